"""An algorithm whose configurations are each trained by several trials, and observed as one."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from shoal.algorithms.base import Algorithm, Problem, Totals, call_text, check_integer
from shoal.algorithms.wrapper import WrapperAlgorithm
from shoal.core.errors import AlgorithmError
from shoal.core.repeats import FOLD, Repeats
from shoal.core.trial import FIRST_ADDED, Decision, Origin, Report, Trial, TrialGroup, TrialState

__all__ = ["Repeated"]


@dataclass
class _Configuration:
    """The trials of one trial of the algorithm, and what they have reported.

    Args:
        target: Last epoch of their budget; None while they are not in training.
        observed: Last epoch that the algorithm has observed.
        reports: Later epoch -> number of a trial -> its report.
        failed: Numbers of the trials that have failed.
        ended: Whether it has failed, or the algorithm has decided on it.
    """

    trials: tuple[Trial, ...]
    target: int | None = None
    observed: int = 0
    reports: dict[int, dict[int, Report]] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    ended: bool = False


class Repeated(WrapperAlgorithm):
    """Trains each configuration of an algorithm as several trials, and gives the algorithm one report of them.

    Trial i of the algorithm is the trials `repeats.trials(i)` of the study: a resume has nothing to restore. The
    algorithm observes an epoch once all of them have reported it, with the aggregates of their metrics, and its
    decision ends all of them. A trial that begins with the checkpoint of another one begins with the same repeat of it.

    If a repeat fails, the others train to the end of the budget; then the algorithm observes a failure, and they are
    STOPPED.
    """

    def __init__(self, inner: Algorithm, repeats: Repeats) -> None:
        super().__init__(inner)
        self._repeats = repeats
        self._configurations: dict[int, _Configuration] = {}

    def __repr__(self) -> str:
        return f"{call_text(self.inner)} with {self._repeats}"

    def begin(self, problem: Problem) -> None:
        """Check that the study can have so many trials.

        Raises:
            AlgorithmError: the study would have too many trials, or the space has a parameter of the fold's name.
        """
        if self._repeats.folds > 1 and FOLD in problem.space.leaves():
            raise AlgorithmError(f"with `folds`, config[{FOLD!r}] is a fold's number; rename {FOLD!r} in the space")
        if self.totals is not None:
            self._check_size(self.totals.trials)

    def extend(self, trials: int) -> None:
        """Extend the algorithm, whose trials count."""
        check_integer("trials", trials)
        self._check_size(trials * self._repeats.size)
        super().extend(trials)

    def _check_size(self, trials: int) -> None:
        if trials > FIRST_ADDED:
            raise AlgorithmError(f"a study has at most {FIRST_ADDED} trials, and {self!r} has {trials}")

    @property
    def totals(self) -> Totals | None:
        """Trials and epochs of the algorithm, times the number of repeats."""
        own, size = self.inner.totals, self._repeats.size
        return own and Totals(own.trials * size, own.least * size, own.most * size)

    def may_return(self, number: int) -> bool:
        """Whether the algorithm may name the configuration of the trial."""
        return self.inner.may_return(self._repeats.configuration(number))

    def next_groups(self, free: int) -> list[TrialGroup]:
        """The groups of the algorithm, with all repeats of each trial."""
        return [
            replace(
                group,
                trials=tuple(trial for own in group.trials for trial in self._begin(own, group.budget.epochs)),
                work_ahead=group.work_ahead * self._repeats.size,
            )
            for group in self.inner.next_groups(-(-free // self._repeats.size))
        ]

    def _begin(self, own: Trial, target: int) -> tuple[Trial, ...]:
        """The repeats of a trial of the algorithm, which train up to a target from now on."""
        if own.number not in self._configurations:
            trials = tuple(self._repeat(own, number) for number in self._repeats.trials(own.number))
            self._configurations[own.number] = _Configuration(trials, observed=own.start)
        configuration = self._configurations[own.number]
        configuration.target = target
        return configuration.trials

    def _repeat(self, own: Trial, number: int) -> Trial:
        origin = own.origin
        if origin is not None:
            same = self._repeats.trials(origin.trial)[number % self._repeats.size]
            origin = Origin(same, origin.epoch)
        return self.problem.trial(number, self._repeats.config(own.config, number), origin)

    def observe(self, report: Report) -> list[Decision]:
        """Process a report; the algorithm observes the aggregates once all repeats have reported the epoch.

        Raises:
            AlgorithmError: the trial is unknown, or beyond its budget.
            TaskError: the report lacks a metric.
        """
        self.check_begun(report.trial, len(self._configurations) * self._repeats.size)
        number = self._repeats.configuration(report.trial)
        own = self._configurations[number]
        reached = self.problem.score_at_target(report, own.target) is not None
        if own.ended or report.trial in own.failed:
            return []
        if report.state is TrialState.FAILED:
            own.failed.add(report.trial)
        elif own.target is None or report.epoch <= own.observed:
            return []
        else:
            kept = own.reports.setdefault(report.epoch, {})
            if reached or report.trial not in kept:
                kept[report.trial] = report
        return self._conclude(number, own, report)

    def _conclude(self, number: int, own: _Configuration, newest: Report) -> list[Decision]:
        """Let the algorithm observe the epoch of the newest report, or a failure, if no repeat is behind."""
        epoch = newest.epoch
        paused = sum(report.state is TrialState.PAUSED for report in own.reports.get(own.target or 0, {}).values())
        if own.failed:
            waits = own.target is not None and paused + len(own.failed) < len(own.trials)
            return [] if waits else self._fail(number, own, epoch)
        reports = [own.reports[epoch][trial.number] for trial in own.trials if trial.number in own.reports[epoch]]
        if (paused if epoch == own.target else len(reports)) < len(own.trials):
            return []
        state = TrialState.PAUSED if epoch == own.target else TrialState.RUNNING
        if state is TrialState.PAUSED:
            own.target = None
        own.observed = epoch
        own.reports = {later: kept for later, kept in own.reports.items() if later > epoch}
        directions = self.problem.of_best.directions(self.problem.objectives, self.problem.constraints)
        metrics = self._repeats.aggregated([report.metrics for report in reports], directions)
        seconds = math.fsum(report.seconds for report in reports)
        return self._of_all(self.inner.observe(Report(number, epoch, metrics, seconds, state)))

    def _fail(self, number: int, own: _Configuration, epoch: int) -> list[Decision]:
        own.ended = True
        reason = f"trial {min(own.failed)}, a repeat of the same configuration, has failed or was stopped"
        others = [trial.number for trial in own.trials if trial.number not in own.failed]
        failed = self.inner.observe(Report(number, epoch, state=TrialState.FAILED, reason=reason))
        return [*(Decision(other, TrialState.STOPPED, reason) for other in others), *self._of_all(failed)]

    def _of_all(self, decisions: Iterable[Decision]) -> list[Decision]:
        """The algorithm's decisions on trials, for all repeats of each."""
        found = []
        for decision in decisions:
            own = self._configurations[decision.trial]
            own.ended, own.target = True, None
            found += [replace(decision, trial=trial.number) for trial in own.trials if trial.number not in own.failed]
        return found
