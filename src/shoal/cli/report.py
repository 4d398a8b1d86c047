"""`shoal report` writes the page of a study; `shoal rerun` trains a trial again."""

import os
import sys
import time
from contextlib import nullcontext, redirect_stdout
from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import AsJson, Devices, StudyDirectory, device_list, print_json, print_message, print_table
from shoal.core.errors import ShoalError
from shoal.journal.view import JournalView
from shoal.page.frozen import check_page_file, write_frozen_page
from shoal.paths import working_directory
from shoal.reporting.accounting import accounting, accounting_json, accounting_table
from shoal.reporting.overview import overview, overview_json
from shoal.reporting.rerun import find_rerun, rerun_json, rerun_notes, rerun_table
from shoal.results import Study

__all__ = ["report", "rerun"]


def report(
    directory: StudyDirectory,
    html: Annotated[
        Path | None, typer.Option(dir_okay=False, help="Where to write it (.html); by default below DIR/report.")
    ] = None,
    spent: Annotated[
        bool, typer.Option("--accounting", help="Print what each second of the devices was spent on; write nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Report what each device of a study did and when, the best trials, and failures with reasons.

    Writes the views of shoal page with the study as it is now: one file that opens in any browser without a server. It
    goes below DIR/report or, without permission to write there, below the working directory. Works on a running study,
    too. With --json the report is printed, and a file is written only with --html.

    With --accounting a table is printed instead: seconds of all devices from the call of the study to its last event,
    by what they were spent on. They sum to the running time of the study times the number of its devices.
    """
    if html is not None and spent:
        raise ShoalError("--html writes a file of its own; leave --accounting out")
    if spent:
        _print_accounting(directory, as_json)
        return
    if html is not None:
        check_page_file(html)
    elif not as_json:
        html = _default_file(directory)
    if html is not None:
        write_frozen_page(directory, html)
    if as_json:
        with JournalView.read(directory) as journal:
            study = overview(journal, time.time())
        print_json({"directory": str(directory), **overview_json(study), "files": [str(html)] if html else []})
    if html is not None:
        print_message(f"written: {html}")


def rerun(
    directory: StudyDirectory,
    trial: Annotated[int, typer.Argument(metavar="TRIAL", min=0, help="Its number; shoal trials DIR shows them.")],
    devices: Devices = None,
    as_json: AsJson = False,
) -> None:
    """Train one trial again, alone, and compare its metrics with those that the study recorded.

    The trial is trained from its start for as many epochs as it has reported, in this process, on the first of the
    study's devices or of --devices, with its own seed, order of samples and random numbers. DIR is not changed. This
    runs code from the study's directory, the pickled task: rerun only trials of people you trust. A class of a module
    is imported as it is now; files of the task that were edited since the last run of the study are named.

    For each metric the largest relative difference over the epochs is shown. In float64 it comes from rounding. In
    float32, on another device or with another number of threads rounding is coarser or different, and chaotic training
    amplifies it: see docs/fusion.md. With --json both curves are printed, and the output of the task goes to standard
    error.
    """
    working_directory()  # for the reason in `run_script`
    with JournalView.read(directory) as journal:
        _, device = find_rerun(journal, trial, device_list(devices))
    print_message(f"training trial {trial} again, alone, on {device.name}")
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        done = Study(directory).rerun(trial, device_list(devices))
    if as_json:
        print_json(rerun_json(done))
        return
    print_table(rerun_table(done))
    for note in rerun_notes(done):
        print_message(note)
    if len(done.found) < len(done.recorded):
        print_message(f"it ended after {len(done.found)} of {len(done.recorded)} epochs, as its loss was not a number")
    print_message(f"{len(done.found)} epochs on {done.device}")


def _print_accounting(directory: Path, as_json: bool) -> None:
    with JournalView.read(directory) as journal:
        found = accounting(journal, time.time())
    if as_json:
        print_json({"directory": str(directory), **accounting_json(found)})
    else:
        print_table(accounting_table(found))


def _default_file(directory: Path) -> Path:
    """Return a file below the study or, without permission to write there, below the working directory."""
    folder = directory / "report"
    if not os.access(folder if folder.exists() else directory, os.W_OK):
        print_message(f"{folder} cannot be written; the report is written below the working directory")
        folder = Path(f"{directory.resolve().name}-report")
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise ShoalError(f"the report cannot be written: {error}; name another file with --html") from error
    return folder / "report.html"
