"""`shoal profile` measures the cost of a search before it runs; `shoal history` shows and clears measurements."""

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal import api
from shoal.cli.command import run_script
from shoal.cli.options import AsJson, Devices, File, Packing, Script, device_list, print_json, print_table, say
from shoal.core.errors import ShoalError
from shoal.cost.history import History, environment, forget, history_path, records
from shoal.dry_run.request import dry_run_request
from shoal.reporting.drawing import check_drawing
from shoal.reporting.dry_run import DryRunTable, draw_dry_run, dry_run_json
from shoal.reporting.history_table import history_table, origins_table, record_json

__all__ = ["history_app", "profile"]

history_app = typer.Typer(
    help="Show or clear the measurements of jobs on this machine.",
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_Kind = Annotated[str | None, typer.Option(help="Only on this kind of device.")]
_Structure = Annotated[str | None, typer.Option(help="Only of structures whose digest begins so.")]


def profile(
    file: File,
    arguments: Script = None,
    trials: Annotated[int, typer.Option(min=1, help="Configurations, as shoal.Random would try them.")] = 8,
    devices: Devices = None,
    packing: Packing = None,
    plot: Annotated[Path | None, typer.Option(dir_okay=False, help="Draw the totals: a .png or .svg file.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the configurations and of all that is random.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure what a search would cost, and whether sharing pays, before it runs.

    Runs a Python file up to its call of shoal.tune, which does not return: no trial is trained to its end, and no
    directory is made. A few configurations of its space are trained for some steps on the first device, and the planner
    makes jobs of them as in a search: a row for each array, with seconds of a step, peak memory, the part of
    preprocessing, the seconds of an epoch, and the deciding rule. IMPV is the part of the time that sharing saves.

    Options replace the arguments that the file gives to shoal.tune. The measurements go into the job history, so a
    search does not measure them again. With --json the output of the file goes to standard error. The exit status is 1
    if no configuration could be measured.
    """
    if plot is not None:
        check_drawing(plot, "a plot", "simulate")
    given = {"devices": device_list(devices), "packing": packing, "seed": seed}
    chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    try:
        with redirect_stdout(sys.stderr) if as_json else nullcontext():
            with api.overridden(**chosen):
                wanted = dry_run_request(lambda: run_script(file, arguments or []))
            if wanted is None:
                raise ShoalError(f"{file} ended without a call of shoal.tune, so there is nothing to measure")
            if wanted.spec["opaque"]:
                raise ShoalError(
                    f"{wanted.spec['task']} is a program of yours, which cannot be tried for a few steps; a study "
                    "learns what it costs while it runs, and shoal.Task is what can be fused and packed"
                )
            from shoal.dry_run.run import dry_run

            history = History(environment=environment())
            found = dry_run(wanted, wanted.trials(trials), history, say)
    except KeyboardInterrupt as stop:
        say("stopped; what was measured so far is in the job history")
        raise typer.Exit(1) from stop
    if as_json:
        print_json(dry_run_json(found))
    else:
        print_table(DryRunTable(found))
    if not found.arrays:
        raise ShoalError("no configuration could be measured; the reasons are above")
    if plot is not None:
        title = f"{file.name}: {wanted.spec['task']}, {found.trials} configurations on {found.device.name}"
        draw_dry_run(found, plot, title)
        say(f"drawn in {plot}")


@history_app.callback()
def _show(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the measurements of jobs on this machine, from all studies; a study measures only what is missing.

    A line for each structure, batch size and kind of device: milliseconds of a training step by the number of members,
    memory per member and of the process without members, compute and cores in use, and how many times as long a step
    takes while members are at different epochs. Measurements of other versions of Python, torch or Shoal are below,
    marked, and are not used. A structure is shown by the beginning of its digest; so is its data, below it, if the
    structure was measured with several. Below the table, for each structure, data and batch size: its tasks with the
    parameters that all its trials agree on, and the reason if only one number of members was measured.
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
    typer.echo(f"{'in' if found else 'no measurements yet in'} {path}")


@history_app.command("clear")
def _clear(kind: _Kind = None, structure: _Structure = None) -> None:
    """Remove measurements, all or those of the options; studies measure them again."""
    path = history_path()
    known = records(path)
    if kind is not None and kind not in (kinds := sorted({record.kind for record in known})):
        measured = ", ".join(map(repr, kinds)) or "none"
        raise ShoalError(f"there are no measurements of the kind {kind!r}; measured kinds: {measured}")
    if structure is not None and not any(record.structure.startswith(structure) for record in known):
        raise ShoalError(f"there are no measurements of a structure that begins with {structure!r}; see: shoal history")
    profiles, pack_speeds = forget(path, kind=kind, structure=structure)
    say(f"removed {profiles} measurements of structures and {pack_speeds} of structures in one process from {path}")
