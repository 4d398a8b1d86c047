"""The command that shows which devices this machine has."""

import typer

from shoal.cli.fleet import add, remove
from shoal.cli.options import AsJson, Devices, device_list, print_json, print_table, say
from shoal.cluster.discover import take_inventory
from shoal.reporting.devices import devices_json, devices_table

__all__ = ["app"]

app = typer.Typer(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})


@app.callback()
def _devices(context: typer.Context, devices: Devices = None, as_json: AsJson = False) -> None:
    """The devices of this machine: what they have, who uses them, whether they can take jobs.

    Shown are those that a study takes by itself, or those of --devices.
    """
    if context.invoked_subcommand is not None:
        return
    found = take_inventory(device_list(devices) or "auto")
    if as_json:
        print_json(devices_json(found))
        return
    print_table(devices_table(found))
    if found.absence:
        say(f"no GPU: {found.absence}")


app.command()(add)
app.command()(remove)
