"""`shoal rerun`: train a trial again and compare its metrics with the recorded ones."""

import sys
from contextlib import nullcontext, redirect_stdout
from typing import Annotated

import typer

from shoal.cli.options import AsJson, Devices, StudyDirectory, device_list, print_json, print_table, say
from shoal.journal.view import JournalView
from shoal.paths import here
from shoal.reporting.rerun import rerun_json, rerun_notes, rerun_table, to_rerun
from shoal.results import Study

__all__ = ["rerun"]


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
    here()  # as of `run_script`
    with JournalView.read(directory) as journal:
        _, device = to_rerun(journal, trial, device_list(devices))
    say(f"training trial {trial} again, alone, on {device.name}")
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        done = Study(directory).rerun(trial, device_list(devices))
    if as_json:
        print_json(rerun_json(done))
        return
    print_table(rerun_table(done))
    for note in rerun_notes(done):
        say(note)
    if len(done.found) < len(done.recorded):
        say(f"it ended after {len(done.found)} of {len(done.recorded)} epochs, as its loss was no number")
    say(f"{len(done.found)} epochs on {done.device}")
