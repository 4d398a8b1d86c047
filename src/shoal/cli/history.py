"""The commands that show and clear what is known of jobs on this machine."""

from typing import Annotated

import typer

from shoal.cli.options import AsJson, print_json, print_table, say
from shoal.core.errors import ShoalError
from shoal.cost.history import environment, forget, history_path, records
from shoal.reporting.history_table import history_table, origins_table, record_json

__all__ = ["app", "clear", "show"]

app = typer.Typer(
    help="What is known of jobs on this machine: show it, or clear it.",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Kind = Annotated[str | None, typer.Option(help="Only on this kind of device.")]
Structure = Annotated[str | None, typer.Option(help="Only of structures whose digest begins so.")]


@app.callback()
def show(context: typer.Context, as_json: AsJson = False) -> None:
    """What was measured of jobs on this machine, in all studies: a study measures only what is not there.

    A line for each structure, batch size and kind of device: milliseconds of a training step by the members in it,
    memory per member and of the process without any, compute and cores in use, and how many times as long a step takes
    while members are at different epochs. What other versions of Python, torch or Shoal measured stands below, marked,
    and is not used. A structure is shown by the beginning of its digest, and below it so is its data where the same
    structure was measured with several. Below the table stand, for each structure, its data then, and batch size, the
    tasks that it came from with the parameters that all its trials agreed on, and why only one number of members was
    measured where that is so.
    """
    if context.invoked_subcommand is not None:
        return
    path, mine = history_path(), environment()
    found = sorted(records(path), key=lambda record: record.environment != mine)
    if as_json:
        print_json({"path": str(path), "environment": mine, "records": [record_json(record, mine) for record in found]})
        return
    if found:
        print_table(history_table(found, mine))
        origins = origins_table(found)
        if origins.row_count:
            typer.echo()
            print_table(origins)
    typer.echo(f"{'in' if found else 'nothing is known yet in'} {path}")


@app.command()
def clear(kind: Kind = None, structure: Structure = None) -> None:
    """Forget what was measured, all of it or what the options name: studies measure it anew."""
    path = history_path()
    known = records(path)
    if kind is not None and kind not in (kinds := sorted({record.kind for record in known})):
        raise ShoalError(f"nothing is known of the kind {kind!r}; known are {', '.join(map(repr, kinds)) or 'none'}")
    if structure is not None and not any(record.structure.startswith(structure) for record in known):
        raise ShoalError(f"nothing is known of a structure that begins with {structure!r}; see: shoal history")
    profiles, pack_speeds = forget(path, kind=kind, structure=structure)
    say(f"removed {profiles} measurements of structures and {pack_speeds} of structures in one process from {path}")
