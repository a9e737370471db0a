"""`python -m intently` is the program `intently`."""

from __future__ import annotations

from intently.cli import main

if __name__ == "__main__":
    main()
