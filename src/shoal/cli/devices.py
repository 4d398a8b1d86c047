"""`shoal devices`: the devices of this machine, and which of them a study may use, also while it runs."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import AsJson, Devices, device_list, print_json, print_table, say, say_when
from shoal.cluster.discover import take_inventory
from shoal.reporting.devices import devices_json, devices_table
from shoal.results import Study

__all__ = ["add", "app", "remove"]

app = typer.Typer(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})

_Study = Annotated[Path, typer.Option("--study", metavar="DIR", exists=True, file_okay=False, help="Of the study.")]
_Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="Of devices: cuda:1 cpu:0 ...")]


@app.callback()
def _devices(context: typer.Context, devices: Devices = None, as_json: AsJson = False) -> None:
    """Show the devices of this machine: properties, programs on them, whether they can take jobs.

    By default the devices that a study takes by itself, else those of --devices.
    """
    if context.invoked_subcommand is not None:
        return
    found = take_inventory(device_list(devices) or "auto")
    if as_json:
        print_json(devices_json(found))
        return
    print_table(devices_table(found))
    if found.absence_reason:
        say(f"no GPU: {found.absence_reason}")


@app.command()
def add(names: _Names, study: _Study, as_json: AsJson = False) -> None:
    """Add devices to a study, also removed ones: at once if it runs, else once it is resumed."""
    _say(study, Study(study).add_devices(names), as_json)


@app.command()
def remove(names: _Names, study: _Study, as_json: AsJson = False) -> None:
    """Remove devices from a study: at once if it runs, else once it is resumed.

    Jobs on them save their trials and stop; the trials go on elsewhere.
    """
    _say(study, Study(study).remove_devices(names), as_json)


def _say(directory: Path, devices: list[str], as_json: bool) -> None:
    what = f"the study in {directory} has {', '.join(devices) or 'no device'}"
    say_when(directory, what, {"devices": devices}, as_json)
