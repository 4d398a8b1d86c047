"""The wrapper that ends trials of any algorithm by rules."""

import math
from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

from shoal.algorithms.base import Algorithm, Problem, Totals, call_text
from shoal.algorithms.rules import Leader, Moment, StopRule
from shoal.algorithms.wrapper import WrapperAlgorithm
from shoal.core.constraint import violation
from shoal.core.errors import AlgorithmError
from shoal.core.trial import Decision, Report, Trial, TrialGroup, TrialState

__all__ = ["StopRules"]


class StopRules(WrapperAlgorithm):
    """Ends trials of an algorithm by rules, each of which suffices; of several metrics they see the first.

    At the last epoch of the longest trials no rule ends a trial: it ends anyway. What the inner algorithm observes of
    a trial that a rule has ended follows from the state:

    - STOPPED: that it failed, as of a trial that a user has stopped.
    - COMPLETE: that it reached its budget, with the value that it has. If it is promoted, it holds this value: it
      reaches each later budget at once, without training. What the inner algorithm decides about it has no effect.

    While a trial holds its value, the inner algorithm proposes after each report, not after all reports of an array.
    Only so are promotions without training, and the decisions that follow from them, a function of the reports.

    Args:
        inner: Search algorithm.
        rules: Rules, at least one.

    Raises:
        AlgorithmError: there is no rule, one is none, or one that completes trials would do so to trials that others
            start from.
    """

    def __init__(self, inner: Algorithm, rules: Sequence[StopRule]) -> None:
        super().__init__(inner)
        self.rules = tuple(rules)
        if not self.rules or not all(isinstance(rule, StopRule) for rule in self.rules):
            raise AlgorithmError(
                f"`stop` must be a list of rules, such as [shoal.Patience(epochs=10)], or [], got {rules!r}"
            )
        holding = [rule for rule in self.rules if rule.ends is TrialState.COMPLETE]
        if holding and inner.copies_trials:
            raise AlgorithmError(
                f"{call_text(holding[0])} does not go with {type(inner).__name__}: a trial that starts from another "
                "continues with a curve of that one, and one that holds its value has no later weights to start from; "
                "leave it out, or give another algorithm"
            )

    def __repr__(self) -> str:
        return f"{call_text(self.inner)} with {' and '.join(map(call_text, self.rules))}"

    def begin(self, problem: Problem) -> None:
        """Begin without trials."""
        for rule in self.rules:
            rule.check(problem, self.longest_budget)
        self._leader: Leader | None = None
        self._training: dict[int, int] = {}  # number of a trial in training -> its target epoch
        self._epochs: dict[int, int] = {}  # number -> last epoch that the rules have seen
        self._best: dict[int, float] = {}  # number -> least loss
        self._memories: dict[int, list[Any]] = {}  # number -> memory of each rule
        self._losses: dict[int, list[float]] = {}  # epoch -> losses of all trials there, ascending
        self._over: set[int] = set()  # trials with a decision
        self._held: dict[int, Mapping[str, float]] = {}  # trials that hold their values and may be promoted -> metrics
        self._waiting: list[TrialGroup] = []  # proposed within `observe`
        self._free = 1

    @property
    def totals(self) -> Totals | None:
        """Trials and epochs of the inner algorithm, but each trial may end after one; None if others replace it."""
        totals = self.inner.totals
        return None if totals is None or self.inner.copies_trials else replace(totals, least=totals.trials)

    def next_groups(self, free: int) -> list[TrialGroup]:
        """The next groups of the inner algorithm, without trials that hold their values."""
        self.check_bound()
        groups = [] if self._held else self.inner.next_groups(free)
        self._begin_training(groups)
        if self._waiting:
            groups, self._waiting = _merged([*self._waiting, *groups]), []
        if groups:  # a call without groups must change nothing, since it is not recorded
            self._free = free
        return groups

    def _begin_training(self, groups: Sequence[TrialGroup]) -> None:
        for group in groups:
            self._training.update((trial.number, group.budget.epochs) for trial in group.trials)

    def observe(self, report: Report) -> list[Decision]:
        """Ask the rules, then the inner algorithm.

        Raises:
            AlgorithmError: the trial is unknown, or beyond its budget.
            TaskError: the report lacks the metric.
        """
        self.check_bound()
        number, target = report.trial, self._training.get(report.trial)
        if number in self._over:
            return []
        seen = report.epoch <= self._epochs.get(number, 0)
        ends = report.state is TrialState.FAILED or (report.state is TrialState.PAUSED and report.epoch == target)
        if target is None or (seen and not ends):
            return self.inner.observe(report)  # which knows no such trial, or has seen the report
        rule, reason = self._asked(report)
        decisions = [] if rule is None else [self._ended(rule, reason, report)]
        for each in self._passed_on(rule, report, target):
            if each.state is not TrialState.RUNNING:
                self._training.pop(number, None)
            decisions += self._kept(self.inner.observe(each))
        return decisions + self._hold_promoted()

    def _asked(self, report: Report) -> tuple[StopRule | None, str]:
        """The first rule that ends the trial with this report, and its reason."""
        number, epoch = report.trial, report.epoch
        if report.state is TrialState.FAILED or epoch <= self._epochs.get(number, 0):
            return None, ""
        others = self._losses.setdefault(epoch, [])
        before, value = self._best.get(number, math.inf), self.problem.value(report)
        longest = self.longest_budget
        moment = Moment(self.problem.objectives[0], epoch, value, before, others, self._leader, longest)
        self._epochs[number] = epoch
        self._best[number] = moment.best
        memories = self._memories.get(number, [None] * len(self.rules))
        asked = [rule.decide(memory, moment) for rule, memory in zip(self.rules, memories, strict=True)]
        self._memories[number] = [memory for memory, _ in asked]
        insort(others, moment.loss)
        if self._leads(moment.loss) and not violation(self.problem.constraints, report.metrics):
            self._leader = Leader(number, moment.loss)
        if epoch == longest:
            return None, ""
        return next(((rule, why) for rule, (_, why) in zip(self.rules, asked, strict=True) if why), (None, ""))

    def _leads(self, loss: float) -> bool:
        return math.isfinite(loss) and (self._leader is None or loss < self._leader.loss)

    def _ended(self, rule: StopRule, reason: str, report: Report) -> Decision:
        self._over.add(report.trial)
        if rule.ends is TrialState.COMPLETE:
            self._held[report.trial] = report.metrics
        return Decision(report.trial, rule.ends, reason)

    def _passed_on(self, rule: StopRule | None, report: Report, target: int) -> list[Report]:
        """The reports that the inner algorithm observes instead of one."""
        if rule is None:
            return [report]
        if rule.ends is TrialState.COMPLETE:
            return [report] if report.state is TrialState.PAUSED else [report, self._held_at(report.trial, target)]
        failed = replace(report, state=TrialState.FAILED)
        return [failed] if report.state is TrialState.PAUSED else [report, failed]

    def _held_at(self, number: int, epoch: int) -> Report:
        return Report(number, epoch, self._held[number], state=TrialState.PAUSED)

    def _kept(self, decisions: Sequence[Decision]) -> list[Decision]:
        """Decisions of the inner algorithm on trials that no rule has ended; no other is promoted any more."""
        kept = [decision for decision in decisions if decision.trial not in self._over]
        for decision in decisions:
            self._held.pop(decision.trial, None)
            self._training.pop(decision.trial, None)
            self._over.add(decision.trial)
        return kept

    def _hold_promoted(self) -> list[Decision]:
        """Let trials that are promoted and hold their values reach their budgets; return the decisions that follow."""
        decisions: list[Decision] = []
        while self._held and not self.inner.finished:
            groups = self.inner.next_groups(self._free)
            trained = [_without(group, self._held) for group in groups]
            self._begin_training(trained)
            self._waiting += [group for group in trained if group.trials]
            promoted = [(trial, group) for group in groups for trial in group.trials if trial.number in self._held]
            if not promoted:
                break
            for trial, group in promoted:
                decisions += self._kept(self.inner.observe(self._held_at(trial.number, group.budget.epochs)))
        return decisions


def _without(group: TrialGroup, held: Mapping[int, object]) -> TrialGroup:
    trials: tuple[Trial, ...] = tuple(trial for trial in group.trials if trial.number not in held)
    return group if trials == group.trials else replace(group, trials=trials)


def _merged(groups: Sequence[TrialGroup]) -> list[TrialGroup]:
    """Groups of one name and budget as one, the largest budget first: they were proposed one report after another."""

    def key(group: TrialGroup) -> tuple[int, str]:
        return -group.budget.epochs, group.name

    merged = []
    for _, alike in groupby(sorted(groups, key=key), key):
        first, *others = alike
        trials = sorted([*first.trials, *(trial for group in others for trial in group.trials)], key=_number)
        merged.append(replace(first, trials=tuple(trials)) if others else first)
    return merged


def _number(trial: Trial) -> int:
    return trial.number
