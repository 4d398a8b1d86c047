"""Comparison of a rerun trial with the record of its study."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

from rich.table import Table

from shoal.core.device import Device
from shoal.core.errors import ShoalError
from shoal.core.rows import TrialRow
from shoal.core.trial import Report, Trial, TrialState
from shoal.host.discover import discover
from shoal.host.sources import edits
from shoal.journal.check import named_trials
from shoal.journal.view import JournalView
from shoal.look.snapshot import TaskEdit, task_edits
from shoal.look.table import task_edit_json
from shoal.look.text import finite_or_none, number_text, rounded, task_edit_text

__all__ = ["Difference", "Rerun", "check_rerun", "find_rerun", "rerun_json", "rerun_notes", "rerun_table"]


def find_rerun(
    journal: JournalView, number: int, devices: str | Sequence[str] | None = None
) -> tuple[TrialRow, Device]:
    """The trial to rerun, and the device for it: the first of `devices`, by default of the study's."""
    (row,) = named_trials(journal, [number])
    check_rerun(row, journal.spec.opaque)
    return row, next(device for _, device in discover(devices or journal.spec.devices))


def check_rerun(row: TrialRow, opaque: object) -> None:
    """Refuse a trial that cannot be rerun, or has no record to compare with."""
    name, trial = f"trial {row.number}", row.trial
    if opaque:
        raise ShoalError(
            f"{name} was trained by a program of yours, whose random numbers Shoal does not know; start the program "
            "with the trial's config: shoal trials DIR --json has it"
        )
    if trial.origin is not None:
        raise ShoalError(
            f"{name} began from the checkpoint of trial {trial.origin.trial} at epoch {trial.origin.epoch}, and of "
            "that trial only the newest checkpoint is kept; rerun a trial that began with its own weights"
        )
    if row.state is TrialState.FAILED:
        raise ShoalError(f"{name} failed, so there is no whole record to compare with: {row.reason}")
    if row.epoch == 0:
        raise ShoalError(f"{name} has not reported an epoch yet, so there is nothing to compare with")


@dataclass(frozen=True)
class Difference:
    """The largest difference of two curves: |a - b| / max(|a|, |b|), 0 for two NaN, infinite for one."""

    relative: float
    epoch: int
    recorded: float
    found: float


@dataclass(frozen=True)
class Rerun:
    """A rerun trial.

    Args:
        recorded: Epoch -> metrics in the journal.
        found: Epoch -> metrics of the rerun; it has fewer epochs if a loss was not finite.
        changed: Paths of files of the task that were edited since the study last ran.
        edits: Resumes of the study with an edited task after the trial had been proposed.
    """

    trial: Trial
    device: str
    recorded: Mapping[int, Mapping[str, float]]
    found: Mapping[int, Mapping[str, float]]
    changed: tuple[str, ...] = ()
    edits: tuple[TaskEdit, ...] = ()

    @staticmethod
    def of(
        trial: Trial,
        device: str,
        recorded: Sequence[Report],
        found: Sequence[Report],
        study: Mapping[str, Any] = MappingProxyType({}),
    ) -> "Rerun":
        """Compare reports; `study` is the description of the study, as of `JournalView.study`."""
        first, second = ({report.epoch: report.metrics for report in side} for side in (recorded, found))
        changed = tuple(edit.path for edit in edits(study.get("sources", {})))
        return Rerun(
            trial, device, first, second, changed, tuple(x for x in task_edits(study) if trial.number < x.next)
        )

    @cached_property
    def differences(self) -> Mapping[str, Difference]:
        """Metric -> largest difference; an epoch or a metric that only one side has counts as NaN on the other."""
        found: dict[str, Difference] = {}
        for name, difference in self._all_differences():
            if name not in found or difference.relative > found[name].relative:
                found[name] = difference
        return found

    @property
    def largest(self) -> float:
        """The largest relative difference of any metric at any epoch."""
        return max(difference.relative for difference in self.differences.values())

    def _all_differences(self) -> Iterator[tuple[str, Difference]]:
        for epoch, metrics in self.recorded.items():
            found_metrics = self.found.get(epoch, {})
            for name in {**metrics, **found_metrics}:
                recorded, found = metrics.get(name, math.nan), found_metrics.get(name, math.nan)
                yield name, Difference(_relative(recorded, found), epoch, recorded, found)


def rerun_table(rerun: Rerun) -> Table:
    """Return a row for each metric."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("metric", "largest relative difference", "at epoch", "recorded", "trained again"):
        table.add_column(name, justify="left" if name == "metric" else "right")
    for name, difference in rerun.differences.items():
        table.add_row(
            name,
            rounded(difference.relative, 2),
            str(difference.epoch),
            number_text(difference.recorded),
            number_text(difference.found),
        )
    return table


def rerun_notes(rerun: Rerun) -> list[str]:
    """Return the reasons why the record, or a part of it, may come from another task than the rerun."""
    notes = [
        f"{task_edit_text(edit)}; what trial {rerun.trial.number} had reported by then is of the task before"
        for edit in rerun.edits
    ]
    if rerun.changed:
        notes.append(f"edited since the study last ran, so that this may be another task: {', '.join(rerun.changed)}")
    return notes


def rerun_json(rerun: Rerun) -> dict[str, Any]:
    """Return the comparison as plain values, with both curves; None for NaN and the infinities."""
    return {
        "trial": rerun.trial.number,
        "device": rerun.device,
        "epochs": max(rerun.recorded),
        "largest": finite_or_none(rerun.largest),
        "changed": list(rerun.changed),
        "edits": [task_edit_json(edit) for edit in rerun.edits],
        "metrics": {
            name: {
                "relative": finite_or_none(difference.relative),
                "epoch": difference.epoch,
                "recorded": [finite_or_none(rerun.recorded[epoch].get(name)) for epoch in sorted(rerun.recorded)],
                "found": [finite_or_none(rerun.found[epoch].get(name)) for epoch in sorted(rerun.found)],
            }
            for name, difference in rerun.differences.items()
        },
    }


def _relative(first: float, second: float) -> float:
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 0.0
    if not (math.isfinite(first) and math.isfinite(second)):
        return math.inf
    return abs(first - second) / max(abs(first), abs(second))
