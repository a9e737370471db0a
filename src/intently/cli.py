"""The command line: arguments in, a report and an exit status out; what needs torch is imported in the commands."""

from __future__ import annotations

import contextlib
import difflib
import io
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.text import Text

from intently import __version__
from intently.errors import CannotCheck

if TYPE_CHECKING:
    from intently.report import Report
    from intently.targets import Target

KEPT, BROKEN, CANNOT, INTERRUPTED = 0, 1, 2, 130
_STATUS = {"kept": KEPT, "broken": BROKEN, "unchecked": CANNOT}
_PIPED_WIDTH = 100

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Tells you whether the attention in a PyTorch model does what you intend.",
    epilog="Exit status: 0 all promises kept, 1 an error was found, 2 could not check.",
)

TargetText = Annotated[
    str,
    typer.Argument(
        metavar="TARGET",
        help="path/file.py:NAME, package.module:NAME, hf:MODEL_TYPE, hf:MODEL_TYPE/CLASS or hf:MODEL_TYPE?FIELD=VALUE, "
        "a folder with a config.json, file.onnx or file.pt2.",
        show_default=False,
    ),
]
IntentText = Annotated[
    str | None,
    typer.Option(
        "--intent",
        metavar="TEXT",
        help="What attention is meant to do, as 'causal', 'bidirectional', 'causal & window(4)' or 'prefix(3)'. "
        "Left out: read from the model's configuration where it says so.",
    ),
]
Tokens = Annotated[int | None, typer.Option(metavar="VOCAB", min=2, help="The model takes token ids below VOCAB.")]
Features = Annotated[int | None, typer.Option(metavar="WIDTH", min=1, help="The model takes vectors of this width.")]
Length = Annotated[int | None, typer.Option(metavar="N", min=2, help="Length of the sequences to try.")]
Padding = Annotated[
    str | None,
    typer.Option(
        metavar="ARG[:keep|:hide]",
        help="The argument that carries the key mask, and whether a true entry keeps or hides a key. "
        "Left out: found by its name.",
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", help="Seed of the inputs and of random models.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback when checking is not possible.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the verdict alone, and no progress.")]


def _version(asked: bool) -> None:
    if asked:
        print(f"intently {__version__}")  # noqa: T201
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None: ...


@app.command()
def check(
    target: TargetText,
    intent: IntentText = None,
    tokens: Tokens = None,
    features: Features = None,
    length: Length = None,
    padding: Padding = None,
    select: Annotated[
        str | None, typer.Option(metavar="NAMES", help="Only these promises or faults, with commas.")
    ] = None,
    ignore: Annotated[
        str | None, typer.Option(metavar="NAMES", help="All but these promises or faults, with commas.")
    ] = None,
    json: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write the report as JSON; '-' is standard output.")
    ] = None,
    dtype: Annotated[
        Literal["auto", "float64", "float32", "bfloat16", "float16"],
        typer.Option(help="What to compute in; auto is float64 where it fits the machine."),
    ] = "auto",
    seed: Seed = 0,
    debug: Debug = False,
    quiet: Quiet = False,
) -> None:
    """Try what the intent promises on TARGET, and name the faults that break it."""
    with _door(debug):
        from intently.reports import files
        from intently.reports import json as as_json

        if json not in (None, "-"):
            files.require_writable(Path(json))
        options = _loading(intent, tokens, features, length, padding, seed)
        with _own_output(), _progress(quiet) as progress:
            from intently.check import check as run

            chosen, ignored = _names("--select", select), _names("--ignore", ignore)
            report = run(
                _load(target, **options), select=chosen, ignore=ignored, dtype=dtype, seed=seed, progress=progress
            )
        with _reader_may_leave():
            if json == "-":
                sys.stdout.write(as_json.dumps(report))
            else:
                _tell(report, quiet)
        if json not in (None, "-"):
            files.write(Path(json), as_json.dumps(report))
            if not quiet:
                _say(f"wrote {json}")
        raise typer.Exit(_STATUS[report.verdict])


@app.command()
def sites(
    target: TargetText,
    intent: IntentText = None,
    tokens: Tokens = None,
    features: Features = None,
    length: Length = None,
    padding: Padding = None,
    seed: Seed = 0,
    debug: Debug = False,
) -> None:
    """List the attention calls that run in TARGET: where, which kernel, which mask, which scale."""
    with _door(debug):
        from intently.reports.terminal import render_sites

        options = _loading(intent, tokens, features, length, padding, seed)
        with _own_output():
            found = _load(target, **options).sites()
        with _reader_may_leave():
            render_sites(found, _console())


@app.command()
def explain(
    name: Annotated[
        str | None, typer.Argument(metavar="[PROMISE|FAULT]", help="Left out: list them all.", show_default=False)
    ] = None,
    debug: Debug = False,
) -> None:
    """Tell about a promise or a fault: how it shows, why nobody notices, what to change."""
    with _door(debug):
        from intently.faults import FAULTS
        from intently.promises import PROMISES
        from intently.reports.explain import render_fault, render_list, render_promise

        console = _console()
        with _reader_may_leave():
            if name is None:
                render_list(PROMISES, FAULTS, console)
            elif name in PROMISES:
                render_promise(PROMISES[name], FAULTS, console)
            elif name in FAULTS:
                render_fault(FAULTS[name], console)
            else:
                raise _unknown(name, [*PROMISES, *FAULTS])


@app.command()
def demo(debug: Debug = False) -> None:
    """Check an honest and a faulty little model, and show both reports."""
    with _door(debug):
        console = _console()
        console.print(
            Text(
                "Two small decoders, alike but for their attention. The first is honest; the second hides three faults "
                "that no loss curve shows. Both are checked the way your own model would be: from outside first, then "
                "inside, then by repairing what looks wrong."
            )
        )
        from intently import demo as models
        from intently.check import check as run

        reports: list[Report] = []
        for name, make in (("The honest one", models.honest), ("The faulty one", models.faulty)):
            with _own_output(), _progress(quiet=False) as progress:
                reports.append(run(make(), progress=progress))
            console.print()
            console.rule(Text(name, style="bold"), characters="-", align="left")
            _tell(reports[-1], quiet=False)
        console.print()
        verdicts = tuple(report.verdict for report in reports)
        if verdicts != ("kept", "broken"):
            console.print(f"The demo failed: expected kept and broken, got {' and '.join(verdicts)}.", style="bold red")
            raise typer.Exit(BROKEN)
        console.print(
            "The demo did what it should: the honest model is kept, the faulty one is broken. "
            "Your own: intently check path/file.py:NAME",
            style="bold",
        )


def main() -> None:
    """Run the program; its exit status says how the check ended."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the terminal lacks must not end a check
            stream.reconfigure(errors="backslashreplace")
    app(prog_name="intently")


# --- loading ---------------------------------------------------------------------------------------------------------


def _loading(
    intent: str | None, tokens: int | None, features: int | None, length: int | None, padding: str | None, seed: int
) -> dict[str, Any]:
    if tokens is not None and features is not None:
        raise typer.BadParameter("a model takes token ids or vectors, not both", param_hint="'--tokens' / '--features'")
    if padding is not None and padding.partition(":")[2] not in ("", "keep", "hide"):
        raise typer.BadParameter(f"{padding!r} should end in :keep or :hide", param_hint="'--padding'")
    return {
        "intent": intent,
        "tokens": tokens,
        "features": features,
        "length": length,
        "padding": padding,
        "seed": seed,
    }


def _load(text: str, **options: Any) -> Target:
    from intently.targets import load

    return load(text, **options)


def _names(option: str, text: str | None) -> tuple[str, ...] | None:
    """The promises and faults named, with commas between."""
    if text is None:
        return None
    from intently.faults import FAULTS
    from intently.promises import PROMISES

    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        if name not in PROMISES and name not in FAULTS:
            raise _unknown(name, [*PROMISES, *FAULTS], option)
    if not names:
        raise CannotCheck(f"{option} names nothing", hint="intently explain lists the names")
    return names


def _unknown(name: str, known: Iterable[str], where: str = "explain") -> CannotCheck:
    near = difflib.get_close_matches(name, list(known), n=3, cutoff=0.5)
    return CannotCheck(
        f"{where}: no promise or fault is named {name!r}",
        hint=", ".join(near) if near else "intently explain lists them all",
    )


# --- what the person sees --------------------------------------------------------------------------------------------


def _console(stderr: bool = False) -> Console:
    """Colour only on a terminal and without NO_COLOR; the same width in every pipe."""
    file = sys.stderr if stderr else sys.stdout
    return Console(file=file, width=None if file.isatty() else _PIPED_WIDTH, highlight=False, emoji=False)


def _say(text: str) -> None:
    _console(stderr=True).print(Text(text), soft_wrap=True)


def _tell(report: Report, quiet: bool) -> None:
    from intently.reports import characters, terminal

    console = _console()
    if quiet:
        characters.show(Text(terminal.verdict(report)), console)
    else:
        terminal.render(report, console)


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Callable[[str, int, int], None] | None]:
    """A line on standard error that follows the check, gone when it ends; none where nobody watches."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_console(stderr=True), transient=True, redirect_stdout=False) as bars:
        task = bars.add_task("loading", total=None)

        def follow(phase: str, done: int, total: int) -> None:
            bars.update(task, description=phase, completed=done, total=total)

        yield follow


@contextlib.contextmanager
def _own_output() -> Iterator[None]:
    """Keep what a model prints out of the report."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """`intently check … | head` closes the pipe early; the exit status still tells the verdict."""
    try:
        yield
        sys.stdout.flush()
    except (BrokenPipeError, SystemExit):  # rich turns the one into the other
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _door(debug: bool) -> Iterator[None]:
    """Every way in which a command can fail, told in a sentence and an exit status."""
    try:
        yield
    except KeyboardInterrupt:
        _say("interrupted; nothing written")
        raise typer.Exit(INTERRUPTED) from None
    except CannotCheck as error:
        _fail(error, debug)
    except (typer.Exit, typer.BadParameter):
        raise
    except SystemExit as error:
        # The target's own code ended the program; its status must not pass for a verdict.
        _fail(CannotCheck(f"the target's code called sys.exit({error.code!r})", hint="guard it with __name__"), debug)
    except Exception as error:
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        _fail(CannotCheck("the check itself failed", cause=what, hint="--debug shows where"), debug)


def _fail(error: CannotCheck, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exc(file=sys.stderr)
    console = _console(stderr=True)
    for label, text in (("cannot check", error.fact), ("cause", error.cause), ("try", error.hint)):
        if text:
            console.print(Text.assemble((f"{label}: ", "bold"), text), soft_wrap=True)
    raise typer.Exit(CANNOT)
