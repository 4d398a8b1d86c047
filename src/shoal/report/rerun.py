"""A trial that was trained again, held against what its study recorded."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.table import Table

from shoal.errors import ShoalError
from shoal.journal.rows import TrialRow
from shoal.report.text import finite, number, rounded
from shoal.trial import Report, Trial, TrialState

__all__ = ["Difference", "Rerun", "check_rerun", "rerun_json", "rerun_table"]


def check_rerun(row: TrialRow, opaque: object) -> None:
    """Refuse a trial that cannot be trained again, or has nothing to be compared with.

    Args:
        row: the trial.
        opaque: what its study trains if that is a program of the user's.

    Raises:
        ShoalError: says why, and what to do instead.
    """
    name, trial = f"trial {row.number}", row.trial
    if opaque:
        raise ShoalError(
            f"{name} was trained by a program of yours, whose random numbers Shoal does not know; start the program "
            "with the trial's config: shoal trials DIR --json has it"
        )
    if trial.origin is not None:
        raise ShoalError(
            f"{name} began with what trial {trial.origin.trial} had learnt by its epoch {trial.origin.epoch}, and of "
            "that trial only the newest checkpoint is kept; train a trial again that began with weights of its own"
        )
    if row.state is TrialState.FAILED:
        raise ShoalError(f"{name} failed, so there is no whole record to compare with: {row.reason}")
    if row.epoch == 0:
        raise ShoalError(f"{name} has not reported an epoch yet, so there is nothing to compare with")


@dataclass(frozen=True)
class Difference:
    """How far apart two curves of a metric are where they are farthest apart.

    Args:
        relative: |a - b| / max(|a|, |b|); 0 for two NaN, infinite for one.
        epoch: where that is.
        recorded: value there that the study recorded.
        found: value there of the training now.
    """

    relative: float
    epoch: int
    recorded: float
    found: float


@dataclass(frozen=True)
class Rerun:
    """A trial that was trained again.

    Args:
        trial: that.
        device: where.
        recorded: epoch to the metrics that the study recorded.
        found: epoch to those of the training now; it has fewer epochs if a loss was no number.
    """

    trial: Trial
    device: str
    recorded: Mapping[int, Mapping[str, float]]
    found: Mapping[int, Mapping[str, float]]

    @staticmethod
    def of(trial: Trial, device: str, recorded: Sequence[Report], found: Sequence[Report]) -> "Rerun":
        """The comparison of reports."""
        one, other = ({report.epoch: report.metrics for report in side} for side in (recorded, found))
        return Rerun(trial, device, one, other)

    @cached_property
    def differences(self) -> Mapping[str, Difference]:
        """Metric to the largest difference; an epoch or a metric that only one side has counts as NaN there."""
        found: dict[str, Difference] = {}
        for name, difference in self._all():
            if name not in found or difference.relative > found[name].relative:
                found[name] = difference
        return found

    @property
    def largest(self) -> float:
        """The largest relative difference of any metric at any epoch."""
        return max(difference.relative for difference in self.differences.values())

    def _all(self) -> Iterator[tuple[str, Difference]]:
        for epoch, metrics in self.recorded.items():
            other = self.found.get(epoch, {})
            for name in {**metrics, **other}:
                one, two = metrics.get(name, math.nan), other.get(name, math.nan)
                yield name, Difference(_relative(one, two), epoch, one, two)


def rerun_table(rerun: Rerun) -> Table:
    """A row for each metric."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("metric", "largest relative difference", "at epoch", "recorded", "trained again"):
        table.add_column(name, justify="left" if name == "metric" else "right")
    for name, most in rerun.differences.items():
        table.add_row(name, rounded(most.relative, 2), str(most.epoch), number(most.recorded), number(most.found))
    return table


def rerun_json(rerun: Rerun) -> dict[str, Any]:
    """The same as plain values, with both curves; None for NaN and the infinities."""
    return {
        "trial": rerun.trial.number,
        "device": rerun.device,
        "epochs": max(rerun.recorded),
        "largest": finite(rerun.largest),
        "metrics": {
            name: {
                "relative": finite(most.relative),
                "epoch": most.epoch,
                "recorded": [finite(rerun.recorded[epoch].get(name)) for epoch in sorted(rerun.recorded)],
                "found": [finite(rerun.found[epoch].get(name)) for epoch in sorted(rerun.found)],
            }
            for name, most in rerun.differences.items()
        },
    }


def _relative(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))
