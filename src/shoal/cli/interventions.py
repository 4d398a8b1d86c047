"""`shoal trial`, `study`, `policy`, `keep`, `pin` and `devices`: requests to a study, which may be running."""

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.options import (
    AsJson,
    Devices,
    StudyDirectory,
    beginning,
    device_list,
    keep_argument,
    one_of,
    print_json,
    print_message,
    print_request,
    print_table,
)
from shoal.host.discover import take_inventory
from shoal.journal import client
from shoal.look.devices import devices_json, devices_table
from shoal.look.text import config_text
from shoal.plan.schedule.registry import POLICIES
from shoal.results import Study

__all__ = ["devices_app", "keep", "pin", "policy", "study_app", "trial_app"]

_HELP = {"help_option_names": ["-h", "--help"]}

trial_app = typer.Typer(no_args_is_help=True, context_settings=_HELP)
study_app = typer.Typer(no_args_is_help=True, context_settings=_HELP)
devices_app = typer.Typer(invoke_without_command=True, context_settings=_HELP)

_Values = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Value of a parameter: lr=0.01, optimizer.name=sgd. Repeatable."),
]
_Outside = Annotated[bool, typer.Option("--outside", help="Allow values outside the space; the journal records this.")]
_Study = Annotated[
    Path, typer.Option("--study", metavar="DIR", exists=True, file_okay=False, help="Directory of the study.")
]
_Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of devices: cuda:1 cpu:0 ...")]
_Numbers = Annotated[list[int], typer.Argument(metavar="N...", help="Numbers of trials.")]


@trial_app.callback()
def _trial() -> None:
    """Pause, stop, retry, add or clone trials of a running or ended study."""


@trial_app.command()
def retry(
    directory: StudyDirectory,
    numbers: Annotated[list[int] | None, typer.Argument(metavar="N", help="Numbers of failed trials.")] = None,
    failed: Annotated[bool, typer.Option("--failed", help="All failed trials.")] = False,
    as_json: AsJson = False,
) -> None:
    """Retry failed trials: now if the study is running, else when it is resumed; the study may have ended.

    A trial continues from its newest checkpoint, else from its start, to the budget at which it failed. Its reports
    count in all tables and for the best trial. The algorithm ignores them, since it has decided without the trial.
    """
    if bool(numbers) == failed:
        raise typer.BadParameter("Name the trials, or all that failed with --failed.", param_hint="N")
    asked = Study(directory).retry(None if failed else numbers)
    _print_trials(directory, asked, "retried", as_json)


@trial_app.command("pause")
def pause_trials(directory: StudyDirectory, numbers: _Numbers, as_json: AsJson = False) -> None:
    """Pause trials until they are resumed; a training trial is saved and leaves its job at the next step.

    Trials that must be compared with a paused one wait for it. Trials stay paused when the study is resumed.
    """
    _print_trials(directory, Study(directory).pause(numbers), "paused", as_json)


@trial_app.command("resume")
def resume_trials(directory: StudyDirectory, numbers: _Numbers, as_json: AsJson = False) -> None:
    """Resume paused trials from the step at which they were paused."""
    _print_trials(directory, Study(directory).resume(numbers), "resumed", as_json)


@trial_app.command()
def stop(directory: StudyDirectory, numbers: _Numbers, as_json: AsJson = False) -> None:
    """Stop trials for good; their reports count, and the algorithm treats them as failed."""
    _print_trials(directory, Study(directory).stop(numbers), "stopped", as_json)


@trial_app.command()
def add(
    directory: StudyDirectory,
    epochs: Annotated[int, typer.Option(min=1, help="Number of epochs to train.")],
    values: _Values = None,
    outside: _Outside = False,
    as_json: AsJson = False,
) -> None:
    """Add a trial with a configuration of your own, and print its number, which is 1000000 or above.

    It counts in tables and for the best trial. The algorithm ignores it.
    """
    nested = client.changed({}, _parsed(values))
    number, config = client.add(directory, nested, epochs, outside=outside)
    text = f"trial {number} with {config_text(config)} will be added"
    print_request(directory, text, {"trial": number, "config": config}, as_json)


@trial_app.command()
def clone(
    directory: StudyDirectory,
    number: Annotated[int, typer.Argument(metavar="N", help="Number of the trial.")],
    values: _Values = None,
    epochs: Annotated[
        int | None, typer.Option(min=1, help="Epoch at which training ends; by default the budget of trial N.")
    ] = None,
    anew: Annotated[bool, typer.Option("--anew", help="Start with new weights.")] = False,
    outside: _Outside = False,
    as_json: AsJson = False,
) -> None:
    """Clone a trial with some values changed, from its newest weights or from new ones, and print the new number.

    The clone starts at the end of the last saved epoch of trial N. It counts like a trial of shoal trial add.
    """
    ((added, config),) = client.clone(directory, number, _parsed(values), epochs=epochs, anew=anew, outside=outside)
    text = f"trial {added}, a clone of trial {number} with {config_text(config)}, will be added"
    print_request(directory, text, {"trial": added, "source": number, "config": config}, as_json)


@study_app.callback()
def _study() -> None:
    """Pause, resume or end a running study."""


@study_app.command("pause")
def pause_study(directory: StudyDirectory, as_json: AsJson = False) -> None:
    """Save all trials and free the devices; the process of the study waits for shoal study resume."""
    Study(directory).pause_study()
    print_request(directory, "the study will be paused", {}, as_json)


@study_app.command("resume")
def resume_study(directory: StudyDirectory, as_json: AsJson = False) -> None:
    """Resume a paused study. To resume a study that is not running, use shoal resume."""
    Study(directory).resume_study()
    print_request(directory, "the study will be resumed", {}, as_json)


@study_app.command("end")
def end_study(directory: StudyDirectory, as_json: AsJson = False) -> None:
    """End the study: all trials are saved, open ones are stopped, and no further trials are proposed."""
    Study(directory).end_study()
    print_request(directory, "the study will end", {}, as_json)


@devices_app.callback()
def _devices(context: typer.Context, devices: Devices = None, as_json: AsJson = False) -> None:
    """Show the devices of this machine: properties, programs that use them, whether they can take jobs.

    By default, those that a study uses with devices="auto".
    """
    if context.invoked_subcommand is not None:
        return
    found = take_inventory(device_list(devices) or "auto")
    if as_json:
        print_json(devices_json(found))
        return
    print_table(devices_table(found))
    if found.absence_reason:
        print_message(f"no GPU: {found.absence_reason}")


@devices_app.command("add")
def add_devices(names: _Names, study: _Study, as_json: AsJson = False) -> None:
    """Add devices to a study, or add removed ones again: now if it is running, else when it is resumed."""
    _print_devices(study, Study(study).add_devices(names), as_json)


@devices_app.command("remove")
def remove_devices(names: _Names, study: _Study, as_json: AsJson = False) -> None:
    """Remove devices from a study: now if it is running, else when it is resumed.

    Jobs on them save their trials and stop; the trials continue on other devices.
    """
    _print_devices(study, Study(study).remove_devices(names), as_json)


def policy(
    directory: StudyDirectory,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            callback=one_of(POLICIES),
            autocompletion=beginning(POLICIES),
            help=f"{', '.join(POLICIES)}.",
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Change the scheduling policy of a study, for the next plan and all later ones."""
    Study(directory).policy(name)
    print_request(directory, f"policy {name} will be followed", {"policy": name}, as_json)


def keep(
    directory: StudyDirectory,
    keep: Annotated[
        str,
        typer.Argument(
            metavar="K", help="Number of best trials to keep; best (with several metrics the front); or all."
        ),
    ],
    as_json: AsJson = False,
) -> None:
    """Change which ended trials keep their weights; deleted weights do not come back."""
    kept = keep_argument(keep)
    Study(directory).keep(kept)  # type: ignore[arg-type]  # it is checked
    print_request(directory, f"weights will be kept by the rule {kept}", {"keep": kept}, as_json)


def pin(directory: StudyDirectory, numbers: _Numbers, as_json: AsJson = False) -> None:
    """Keep the checkpoints of trials whatever their rank."""
    _print_trials(directory, Study(directory).pin(numbers), "pinned", as_json)


_DECIMAL = re.compile(r"[+-]?(\d+\.\d*|\.\d+)([eE][+-]?\d+)?")
"""A number with a point as Python has it; JSON has digits on both sides of the point, and no plus."""


def _parsed(values: list[str] | None) -> dict[str, Any]:
    """Return the values of "name=value" by name; a value is JSON, a number such as .5 or 5., or else plain text."""
    found: dict[str, Any] = {}
    for text in values or ():
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE, such as lr=0.01", param_hint="--set")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = float(value) if _DECIMAL.fullmatch(value) else value
    return found


def _print_trials(directory: Path, asked: list[int], text: str, as_json: bool) -> None:
    named = f"trial{'s' if len(asked) > 1 else ''} {', '.join(map(str, asked))}"
    print_request(directory, f"{named} will be {text}", {"trials": asked}, as_json)


def _print_devices(directory: Path, devices: list[str], as_json: bool) -> None:
    """Print the devices that a study has after a request, and when the request is carried out."""
    text = f"the study in {directory} has {', '.join(devices) or 'no device'}"
    print_request(directory, text, {"devices": devices}, as_json)
