"""Comparison of a rerun trial with the record of its study."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeVar

from rich.table import Table
from rich.text import Text

from shoal.core.device import Device
from shoal.core.errors import ShoalError
from shoal.core.rows import TrialRow, Verdict
from shoal.core.trial import Report, Trial, TrialState
from shoal.host.discover import discover
from shoal.host.sources import edits
from shoal.journal.check import named_trials
from shoal.journal.view import JournalView
from shoal.look.snapshot import TaskEdit, task_edits
from shoal.look.table import task_edit_json
from shoal.look.text import (
    finite_or_none,
    number_text,
    printable,
    rounded,
    shortened,
    task_edit_text,
    trial_verdict_text,
)

__all__ = [
    "Difference",
    "Rerun",
    "check_rerun",
    "find_rerun",
    "rerun_json",
    "rerun_notes",
    "rerun_table",
    "rerun_verdict",
]

K = TypeVar("K")

Curve = Mapping[int, Mapping[str, float]]
"""Epoch -> metrics."""

_CHANCE = 4.0
"""Factor by which two trainings that rounding has driven apart may differ more than two others."""


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
    """A difference of a metric at an epoch: |a - b| / max(|a|, |b|), 0 for two NaN, infinite for one."""

    metric: str
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
        tolerance: Relative difference that the rounding of one training step explains.
        perturbation: Relative change of the initial weights that stands for the rounding of a whole training.
        repeated: Curve of a second, equal rerun; empty if `recorded` and `found` differ by at most `tolerance`, or the
            task was edited.
        perturbed: Curve of a rerun with so changed initial weights; empty if `repeated` leaves nothing to explain.
        proof: Comparison with plain PyTorch while the trial was trained; None if it was in no array.
        continued: Epochs that another job reported than the epoch before.
        changed: Paths of files of the task that were edited since the study last ran.
        edits: Resumes of the study with an edited task after the trial had been proposed.
    """

    trial: Trial
    device: str
    recorded: Curve
    found: Curve
    tolerance: float
    perturbation: float
    repeated: Curve = field(default_factory=dict)
    perturbed: Curve = field(default_factory=dict)
    proof: Verdict | None = None
    continued: frozenset[int] = frozenset()
    changed: tuple[str, ...] = ()
    edits: tuple[TaskEdit, ...] = ()

    @staticmethod
    def of(
        trial: Trial,
        device: str,
        recorded: Sequence[Report],
        found: Sequence[Report],
        tolerance: float,
        perturbation: float,
        study: Mapping[str, Any] = MappingProxyType({}),
        proof: Verdict | None = None,
        continued: frozenset[int] = frozenset(),
    ) -> "Rerun":
        """Compare reports; `study` is the description of the study, as of `JournalView.study`."""
        return Rerun(
            trial,
            device,
            {report.epoch: report.metrics for report in recorded},
            {report.epoch: report.metrics for report in found},
            tolerance,
            perturbation,
            proof=proof,
            continued=continued,
            changed=tuple(edit.path for edit in edits(study.get("sources", {}))),
            edits=tuple(each for each in task_edits(study) if trial.number < each.next),
        )

    def with_further(self, reports: Sequence[Report]) -> "Rerun":
        """Add `repeated`, or after it `perturbed`, the newest of which counts; no metrics follow a loss that was not
        finite.
        """
        metrics = {report.epoch: report.metrics for report in reports}
        curve = {epoch: metrics.get(epoch, {}) for epoch in self.recorded}
        return replace(self, perturbed=curve) if self.repeated else replace(self, repeated=curve)

    @cached_property
    def differences(self) -> Mapping[str, Difference]:
        """Metric -> largest difference; an epoch or a metric that only one side has counts as NaN on the other."""
        return _largest(_differences(self.recorded, self.found), lambda each: each.metric)

    @cached_property
    def irreproducible(self) -> Mapping[str, Difference]:
        """Metric -> largest difference of two equal reruns, if it is beyond `tolerance`."""
        found = _largest(_differences(self.repeated, self.found), lambda each: each.metric)
        return {name: each for name, each in found.items() if each.relative > self.tolerance}

    @cached_property
    def by_epoch(self) -> Mapping[int, Difference]:
        """Epoch -> its largest difference of any metric that is not `irreproducible`; empty without such metrics."""
        return _largest(self._reproducible(self.recorded), lambda each: each.epoch)

    def _reproducible(self, curve: Curve) -> Iterator[Difference]:
        return (each for each in _differences(curve, self.found) if each.metric not in self.irreproducible)

    @property
    def first(self) -> Difference | None:
        """The first difference of `by_epoch` beyond `tolerance`; None without one."""
        return next((each for each in self.by_epoch.values() if each.relative > self.tolerance), None)

    @cached_property
    def unexplained(self) -> Difference | None:
        """The first difference that rounding does not explain; None without one.

        Rounding explains `tolerance`, and a few times as much as the metric has moved, up to the same epoch, in a rerun
        with changed initial weights. A metric that counts samples may not have moved yet; those that have moved then
        stand for it.
        """
        for each in self._reproducible(self.recorded):
            if each.relative > max(self.tolerance, _CHANCE * self.carried(each.epoch, each.metric)):
                return each
        return None

    def carried(self, epoch: int, metric: str) -> float:
        """The largest difference that the change of the initial weights has made up to an epoch, of a metric."""
        until = [each for each in self._carried if each.epoch <= epoch]
        own = max((each.relative for each in until if each.metric == metric), default=0.0)
        return own or max((each.relative for each in until), default=0.0)

    @cached_property
    def _carried(self) -> list[Difference]:
        return list(self._reproducible(self.perturbed))

    @property
    def expected(self) -> bool | None:
        """Whether rounding explains all differences of `by_epoch`; None without any, or for those of an edited task."""
        if not self.by_epoch or (self.first is not None and (self.changed or self.edits)):
            return None
        return self.unexplained is None

    @property
    def largest(self) -> float:
        """The largest relative difference of any metric at any epoch."""
        return max(difference.relative for difference in self.differences.values())


def rerun_table(rerun: Rerun) -> Table:
    """Return a row for each metric, with its largest relative difference; only the names fold."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    table.add_column("metric", overflow="fold")
    for name in ("differs", "epoch", "recorded", "rerun"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, difference in rerun.differences.items():
        table.add_row(
            Text(printable(name)),
            rounded(difference.relative, 2),
            str(difference.epoch),
            number_text(difference.recorded),
            number_text(difference.found),
        )
    return table


def rerun_verdict(rerun: Rerun) -> list[str]:
    """Return in sentences from which epoch on the two trainings differ, and whether rounding explains it."""
    first, wrong = rerun.first, rerun.unexplained
    unequal = map(_text, rerun.irreproducible.values())
    lines = [f"this task is not reproducible: two equal reruns differ in {each}" for each in unequal]
    if not rerun.by_epoch:
        return lines
    others = "the other metrics are " if lines else ""
    largest = max(rerun.by_epoch.values(), key=lambda each: each.relative)
    if largest.relative == 0:
        return [*lines, f"{others}equal to the last bit at every epoch"]
    if first is None:
        return [*lines, f"{others}equal to {_share(largest.relative)} at every epoch, which rounding explains"]
    line = f"differs from the first epoch on: {_text(first)}"
    if first.epoch > 1:
        agree = f"equal to {_share(rerun.tolerance)} up to epoch {first.epoch - 1}"
        line = f"{agree}; differs from epoch {first.epoch} on: {_text(first)}"
    if largest is not first:
        line += f"; the largest difference is {_text(largest)}"
    lines.append(line)
    if rerun.expected is None:
        return [*lines, "cannot tell whether that is expected: the task was edited"]
    changed = f"a change of its initial weights by {_share(rerun.perturbation)}"
    if wrong is None:
        carried = max(rerun.carried(each.epoch, each.metric) for each in (first, largest))
        return [*lines, f"expected, as training amplifies rounding: {changed} {_moves(carried)}"]
    carried = rerun.carried(wrong.epoch, wrong.metric)
    causes = "an edit of the task or its data, another device or version, random numbers that Shoal does not seed"
    if wrong.epoch in rerun.continued:
        causes = f"state that its checkpoints lack, as another job continued it in epoch {wrong.epoch}; {causes}"
    return [
        *lines,
        f"not expected, rounding does not explain {_text(wrong)}: {changed} {_moves(carried)} by then",
        f"possible causes: {causes}",
    ]


def rerun_notes(rerun: Rerun) -> list[str]:
    """Return what was proven of the recorded training, and why a part of it may come from another task."""
    notes = [] if rerun.proof is None else [f"while the study trained it: {trial_verdict_text(rerun.proof)}"]
    notes += [
        f"{task_edit_text(edit)}; what trial {rerun.trial.number} had reported by then is of the task before"
        for edit in rerun.edits
    ]
    if rerun.changed:
        notes.append(f"edited since the study last ran, so that this may be another task: {', '.join(rerun.changed)}")
    return notes


def rerun_json(rerun: Rerun) -> dict[str, Any]:
    """Return the comparison as plain values, with all curves; None for NaN and the infinities."""
    curves = {each: getattr(rerun, each) for each in ("recorded", "found", "repeated", "perturbed")}
    return {
        "trial": rerun.trial.number,
        "device": rerun.device,
        "epochs": max(rerun.recorded),
        "largest": finite_or_none(rerun.largest),
        "expected": rerun.expected,
        "verdict": rerun_verdict(rerun),
        "first_epoch": None if rerun.first is None else rerun.first.epoch,
        "by_epoch": [finite_or_none(each.relative) for each in rerun.by_epoch.values()],
        "tolerance": rerun.tolerance,
        "perturbation": rerun.perturbation,
        "irreproducible": list(rerun.irreproducible),
        "changed": list(rerun.changed),
        "edits": [task_edit_json(edit) for edit in rerun.edits],
        "metrics": {
            name: {
                "relative": finite_or_none(difference.relative),
                "epoch": difference.epoch,
                **{
                    which: [finite_or_none(curve[epoch].get(name)) for epoch in sorted(curve)]
                    for which, curve in curves.items()
                },
            }
            for name, difference in rerun.differences.items()
        },
    }


def _differences(first: Curve, second: Curve) -> Iterator[Difference]:
    """Compare the epochs of the first curve; an epoch or a metric that only one side has is NaN on the other."""
    for epoch, metrics in first.items():
        others = second.get(epoch, {})
        for name in {**metrics, **others}:
            recorded, found = metrics.get(name, math.nan), others.get(name, math.nan)
            yield Difference(name, _relative(recorded, found), epoch, recorded, found)


def _largest(differences: Iterable[Difference], key: Callable[[Difference], K]) -> dict[K, Difference]:
    """Key -> its largest difference, the first of equal ones."""
    found: dict[K, Difference] = {}
    for each in differences:
        if key(each) not in found or each.relative > found[key(each)].relative:
            found[key(each)] = each
    return found


def _text(difference: Difference) -> str:
    name = shortened(printable(difference.metric))
    if difference.relative == math.inf:
        return f"{name} at epoch {difference.epoch}, finite in only one of the two"
    return f"{name} by {_share(difference.relative)} at epoch {difference.epoch}"


def _moves(relative: float) -> str:
    if relative == math.inf:
        return "decides whether a metric is finite"
    return f"moves the trial by {_share(relative)}" if relative else "does not move the trial"


def _share(relative: float) -> str:
    """Return a relative difference in percent, or, if it is tiny, as a power of ten."""
    return f"{rounded(100 * relative, 2)} %" if relative >= 1e-3 else rounded(relative, 2)


def _relative(first: float, second: float) -> float:
    if first == second or (math.isnan(first) and math.isnan(second)):
        return 0.0
    if not (math.isfinite(first) and math.isfinite(second)):
        return math.inf
    return abs(first - second) / max(abs(first), abs(second))
