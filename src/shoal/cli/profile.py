"""The command that says before a search what its configurations cost, and whether sharing pays."""

import sys
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal import api
from shoal.cli.options import AsJson, Devices, File, Packing, Script, device_list, print_json, print_table, say
from shoal.cli.script import run_script
from shoal.core.errors import ShoalError
from shoal.cost.history import History, environment
from shoal.dry_run.request import dry_run_request
from shoal.reporting.drawing import check_drawing
from shoal.reporting.dry_run import DryRunTable, draw_dry_run, dry_run_json

__all__ = ["profile"]


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
    """Say what a search would cost, and whether sharing pays, before it is run.

    Runs a Python file up to its call of shoal.tune, which does not return: nothing is trained to an end, and no
    directory made. A few configurations of its space are trained for some steps on the first device, and the planner
    makes jobs of them as in a search: a row for each array, with seconds of a step, peak memory, the part of
    preprocessing, the seconds of an epoch, and what decided. IMPV is the part of the time that sharing saves.

    Options count instead of what the file gives to shoal.tune. What is measured goes into the job history, so a search
    that follows does not measure it again. With --json what the file prints goes to standard error. The exit status is
    1 if no configuration could be measured.
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
