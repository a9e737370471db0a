"""`python -m intently.demo --svg FILE`: the report on the faulty decoder as a picture, from a run made on the spot."""

from __future__ import annotations

import argparse
from pathlib import Path

from intently import demo
from intently.check import check
from intently.reports import files


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m intently.demo", description=__doc__)
    parser.add_argument("--svg", type=Path, required=True, metavar="FILE", help="where to write the picture")
    path = parser.parse_args().svg
    files.require_writable(path)
    files.write(path, files.svg(check(demo.faulty())))


if __name__ == "__main__":
    main()
