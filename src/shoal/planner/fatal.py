"""Which failures end a study, as every other job would end so too."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import ShoalError, StorageFullError, StudyFailedError, TaskError, UnusableTaskError
from shoal.planner.cause import log_of
from shoal.planner.event import Dropped, Ended, Outcome
from shoal.planner.job import Member, Purpose
from shoal.planner.standings import Standing, Standings
from shoal.space import flatten
from shoal.trial import TrialState

__all__ = ["ALIKE", "FirstFailures", "fatal", "remedy"]

ALIKE = 5
"""So many trials that fail of one cause, each by itself, end a study in which no trial has reported anything."""


def fatal(
    failed: Ended | Dropped, purpose: Purpose, members: Sequence[Member], trials: Standings, directory: Path
) -> ShoalError | None:
    """The error that ends the study, if there is to be one.

    A task that breaks its contract does so for all trials, unless one has got past it.

    Args:
        failed: what was said of a job, or of some of its arrays.
        purpose: of the job.
        members: of what failed.
        trials: of the study.
        directory: of the study.
    """
    if failed.outcome is Outcome.STORAGE_FULL:
        return StorageFullError(
            f"{failed.message}\nEverything recorded is intact; free some space, then: shoal resume {directory}"
        )
    if failed.outcome is Outcome.UNUSABLE:
        return UnusableTaskError(
            f"{failed.message}\nNothing is lost; once that is mended, go on with: shoal resume {directory}"
        )
    for_all = purpose is Purpose.SURVEY or not any(x.epoch for x in trials)
    if failed.outcome is Outcome.REJECTED and for_all and members:
        first, *others = members
        company = f" and {len(others)} more" if others else ""
        config = dict(first.trial.config)
        return TaskError(f"{failed.message}\nIt was met with trial {first.trial.number}{company}: {config}")
    return None


def remedy(directory: Path, *, kept: bool, lost: bool) -> str:
    """What to do about a task that fails in all trials.

    Args:
        directory: of the study.
        kept: whether the study keeps the task's definition, so that an edit does not reach it.
        lost: whether trials have failed for good.
    """
    again = f"shoal resume {directory} --accept-changes"  # to mend is to edit
    if lost:
        again = f"shoal trial retry {directory} --failed, and then {again}"
    if not kept:
        return f"Mend that, then go on with: {again}"
    return (
        "The study keeps what a script or a notebook defines as it was: mend that and begin a new study. Where the "
        f"fault is elsewhere, in a module, in data or in the machine, mend it and go on with: {again}"
    )


@dataclass(frozen=True)
class _Failure:
    """How a trial failed last.

    Args:
        cause: the outcome, and the line that a traceback ends with.
        message: all that was said of it.
        counts: whether nothing but the trial itself can be to blame.
    """

    cause: tuple[Outcome, str]
    message: str
    counts: bool


class FirstFailures:
    """Notices that the first trials of a study all fail of one cause, as all others would.

    The study is to end once `ALIKE` trials have failed so, each by itself and not in an array with others, before any
    trial reported anything since this engine began. A study of fewer trials ends when all of them have failed for good.
    It goes on as long as

    - the trials that failed agree on a parameter on which another open trial differs: that value may be to blame, as in
      a grid of models of which the first cannot be built;
    - a trial runs that has never failed and was begun no later than the one that failed last: it has outlived that one.

    A trial that ran out of memory counts when it has failed for good: alone, or on another device, it may do well.

    Args:
        trials: of the study.
    """

    def __init__(self, trials: Standings) -> None:
        self._trials = trials
        self._failures: dict[int, _Failure] = {}
        self._over = False

    def reported(self) -> None:
        """A trial has reported a value, so not all fail."""
        self._over = True
        self._failures.clear()

    def note(self, number: int, outcome: Outcome, cause: str, message: str, *, alone: bool, lost: bool) -> None:
        """A trial has failed.

        Args:
            number: the trial's.
            outcome: of its array.
            cause: of that, in a line.
            message: all that was said of it.
            alone: whether the array had no more members.
            lost: whether the trial has failed for good.
        """
        if not self._over:
            counts = lost or (alone and outcome is not Outcome.OUT_OF_MEMORY)
            self._failures[number] = _Failure((outcome, cause), message, counts)

    def hopeless(self, last: Iterable[int]) -> tuple[int, ...]:
        """Numbers of the trials that failed of one cause, those in arrays too, if the study is to end; else none.

        Args:
            last: of the trials that have just failed.
        """
        for number in last:
            found = self._failures.get(number)
            if found is None or not found.counts:
                continue
            alike = [n for n, failure in sorted(self._failures.items()) if failure.cause == found.cause]
            certain = [self._trials[n] for n in alike if self._failures[n].counts]
            if len(certain) >= ALIKE and not self._may_differ(certain) and not self._is_outlived(self._trials[number]):
                return tuple(alike)
        return ()

    def error(self, alike: Sequence[int], directory: Path, *, kept: bool) -> StudyFailedError:
        """What ends the study.

        Args:
            alike: the trials of `hopeless`.
            directory: of the study.
            kept: see `remedy`.
        """
        certain = [number for number in alike if self._failures[number].counts]
        first = self._failures[certain[0]]
        logs = dict.fromkeys(log for number in certain if (log := log_of(self._failures[number].message)))
        lost = any(self._trials[number].state.final for number in alike)
        return StudyFailedError(
            f"the first {len(certain)} trials failed alike, and none has reported anything; trial {certain[0]}:\n\n"
            f"{first.message}\n\n"
            f"Failed so: trials {', '.join(map(str, certain))}; logs: {', '.join(logs) or 'none'}\n"
            f"Nothing is lost, the others stay open. {remedy(directory, kept=kept, lost=lost)}",
            directory,
        )

    def record(self, alike: Sequence[int]) -> dict[str, Any]:
        """The same in JSON values, for those who look at the study later: the cause, the trials and a log.

        Args:
            alike: the trials of `hopeless`.
        """
        certain = [number for number in alike if self._failures[number].counts]
        first = self._failures[certain[0]]
        return {"text": first.cause[1], "trials": certain, "log": log_of(first.message)}

    def _may_differ(self, failed: Sequence[Standing]) -> bool:
        """Whether a value that all of these have, and not all others, may be to blame."""
        tried = {standing.number for standing in failed}
        configs = [flatten(standing.trial.config) for standing in failed]
        common = {name: value for name, value in configs[0].items() if all(_has(each, name, value) for each in configs)}
        others = (flatten(x.trial.config) for x in self._trials if not x.state.final and x.number not in tried)
        return any(not _has(other, name, value) for other in others for name, value in common.items())

    def _is_outlived(self, failed: Standing) -> bool:
        running = (x for x in self._trials if x.state is TrialState.RUNNING)
        return any(x.failures == 0 and x.begun <= failed.begun for x in running)


def _has(config: Mapping[str, object], name: str, value: object) -> bool:
    return name in config and config[name] == value
