"""Arguments and options that several commands share, and functions that print output."""

import json
import sys
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.host.plain_characters import encodable
from shoal.host.remedy import command
from shoal.journal.view import JournalView
from shoal.look.text import printable
from shoal.plan.packing.registry import PACKINGS
from shoal.plan.schedule.registry import BASELINES, baseline_text

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = [
    *("AsJson", "Devices", "Packing", "Script", "StudyDirectory"),
    *("beginning", "best_by_argument", "device_list", "keep_argument", "named_option", "one_of"),
    *("print_json", "print_message", "print_request", "print_table"),
]

_PIPE_WIDTH = 200
"""Width of a table that is not printed to a terminal, in characters."""


def one_of(names: Collection[str]) -> Callable[[str | None], str | None]:
    """Return a callback that refuses an option whose value is not in `names`."""

    def check(value: str | None) -> str | None:
        if value in BASELINES and value not in names:
            raise typer.BadParameter(baseline_text(value))
        if value is not None and value not in names:
            raise typer.BadParameter(f"{value!r} is not one of {', '.join(names)}")
        return value

    return check


def _all_of(names: Collection[str]) -> Callable[[list[str] | None], list[str] | None]:
    """Return a callback that refuses a repeatable option with a value that is not in `names`."""
    check = one_of(names)

    def check_all(values: list[str] | None) -> list[str] | None:
        for value in values or ():
            check(value)
        return values

    return check_all


def beginning(names: Collection[str]) -> Callable[[str], list[str]]:
    """Return a function by which a shell completes one of some names."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


def named_option(
    names: Collection[str], text: str, *declarations: str, repeatable: bool = False, panel: str | None = None
) -> Any:
    """Return an option whose value is one of some names, which a shell completes."""
    check: Callable[..., Any] = _all_of(names) if repeatable else one_of(names)
    listed = f"{text}: {', '.join(names)}.{' Repeatable.' if repeatable else ''}"
    return typer.Option(
        *declarations, callback=check, autocompletion=beginning(names), help=listed, rich_help_panel=panel
    )


def device_list(value: str | None) -> str | list[str] | None:
    """Convert "cuda:0,cuda:1" to the list that `tune` takes."""
    return value.split(",") if value is not None and "," in value else value


Script = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the file; put its options after --.")
]
StudyDirectory = Annotated[
    Path, typer.Argument(metavar="DIR", exists=True, file_okay=False, help="Directory of a study.")
]
Devices = Annotated[str | None, typer.Option(help="Devices: auto, cpu:2, cuda, cuda:0,cuda:1 ...")]
Packing = Annotated[str | None, named_option(PACKINGS, "How arrays are packed into processes")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def best_by_argument(text: str) -> str | dict[str, str]:
    """Return the argument `best_by` of `tune`."""
    name, _, mode = text.rpartition(":")
    return {name: mode} if name and mode in ("min", "max") else text


def keep_argument(text: str) -> int | str:
    """Return the argument `keep` of `tune`."""
    return int(text) if text.isdecimal() else text


def print_table(text: "RenderableType") -> None:
    """Print a rich renderable at the width of the terminal; in a file or a pipe its lines end with their text."""
    from rich.console import Console  # not needed by `shoal run`

    if sys.stdout.isatty():
        Console().print(text)
        return
    console = Console(width=_PIPE_WIDTH)
    with console.capture() as captured:
        console.print(text)
    for line in captured.get().splitlines():
        typer.echo(encodable(line.rstrip(), sys.stdout))  # which writes UTF-8 where only ASCII is known


def print_json(value: object) -> None:
    """Print a line of JSON."""
    typer.echo(json.dumps(value))


def print_message(line: str) -> None:
    """Print a line for the user on standard error, if it can be written there."""
    with suppress(OSError):
        typer.echo(encodable(f"shoal: {printable(line, lines=True)}", sys.stderr), err=True)


def print_request(directory: Path, text: str, values: Mapping[str, Any], as_json: bool) -> None:
    """Print whether a request is carried out now, or when the study is resumed."""
    with JournalView.read(directory) as journal:
        runs = journal.writer() is not None
    if as_json:
        print_json({"directory": str(directory), **values, "runs": runs})
        return
    print_message(f"{text} now" if runs else f"{text} when the study is resumed: {command('resume', directory)}")
