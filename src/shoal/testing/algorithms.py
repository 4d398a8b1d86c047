"""Conformance suite for search algorithms: runs one on invented results and checks its contract."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shoal.algorithms.base import Algorithm
from shoal.algorithms.loss_trend import LossTrend
from shoal.algorithms.rules import Patience, Percentile, StopRule, Threshold
from shoal.algorithms.stop_rules import StopRules
from shoal.algorithms.wrapper import WrapperAlgorithm
from shoal.core.errors import AlgorithmError, ShoalError, TaskError
from shoal.core.space import Space
from shoal.core.trial import Budget, Decision, EarlierTrial, Report, Trial, TrialGroup, TrialState, derive_seed

__all__ = [
    "check_algorithm",
    "check_constraints",
    "check_earlier",
    "check_extension",
    "check_failures",
    "check_may_return",
    "check_order_does_not_matter",
    "check_repeated_reports",
    "check_replay",
    "check_seeds",
    "check_several_metrics",
    "check_stop_rules",
    "check_totals",
    "check_wrong_reports",
]

_Objective = Callable[[int, int], float | None]
"""(number of the trial, epoch) -> value of its metric; None if the trial fails at that epoch."""

_METRIC = "score"
_COST = "cost"
_BOUNDS = {_COST: "<= 0.5"}
_EARLIER_TRIALS = 12
_MAX_EPOCHS = 100_000
"""Most epochs of all trials together; an algorithm that needs more is taken for one that never ends."""


def check_algorithm(make: Callable[[], Algorithm], space: Space, *, synchronous: bool = True) -> None:
    """Run the whole suite on an algorithm.

    Args:
        make: Factory of new, unbound instances with the same settings.
        space: Space that the algorithm can search.
        synchronous: Whether its decisions do not depend on the order of the reports of different trials.

    Raises:
        AssertionError: the contract of `shoal.algorithms.Algorithm` is broken; the message says where.
    """
    check_failures(make, space)
    check_seeds(make, space)
    check_totals(make, space)
    check_may_return(make, space)
    if synchronous:
        check_order_does_not_matter(make, space)
    check_repeated_reports(make, space)
    check_replay(make, space)
    check_wrong_reports(make, space)
    check_stop_rules(make, space, synchronous=synchronous)
    check_extension(make, space, synchronous=synchronous)
    check_constraints(make, space, synchronous=synchronous)
    check_earlier(make, space, synchronous=synchronous)
    check_several_metrics(make, space, synchronous=synchronous)


def check_failures(make: Callable[[], Algorithm], space: Space) -> None:
    """The study ends, by the rules, if no trial fails, if some fail or measure NaN, and if all do."""
    for mode in ("min", "max"):
        for objective in (_smooth, _noisy, _rarely_fails, _always_fails, _always_nan):
            _AlgorithmDriver(_bound(make, space, mode=mode), objective).run()


def check_seeds(make: Callable[[], Algorithm], space: Space) -> None:
    """A trial follows from the study's seed and its number; data seeds are shared if one is given."""
    first, again, other = (_proposed(_bound(make, space, seed=seed)) for seed in (1, 1, 2))
    assert first == again, "the same seed gave different trials"
    pairs = list(zip(first, other, strict=False))
    assert all(one.seed != two.seed for one, two in pairs), "trials of another seed start from the same weights"
    assert len({trial.seed for trial in first}) == len(first), "two trials share a seed"
    assert len({trial.data_seed for trial in first}) == len(first), (
        "two trials share a data seed, though none was given"
    )
    shared = {trial.data_seed for trial in _proposed(_bound(make, space, data_seed=7))}
    assert shared == {7}, f"the data seed given was 7, the trials have {sorted(shared)}"


def check_totals(make: Callable[[], Algorithm], space: Space) -> None:
    """The trials and epochs match `totals` if no trial fails and none measures NaN."""
    for objective in (_smooth, _random):
        for order in range(2):
            driver = _AlgorithmDriver(_bound(make, space), objective, order=order)
            announced = driver.algorithm.totals
            if announced is None:
                return
            trials = len(driver.run().trials)
            epochs = sum(done - driver.trials[number].start for number, done in driver.epochs.items())
            assert trials == announced.trials, f"{announced} was announced, {trials} trials were requested"
            assert announced.least <= epochs <= announced.most, (
                f"{announced} was announced, {epochs} epochs were requested"
            )
            assert driver.algorithm.totals == announced, (
                f"{announced} was announced, {driver.algorithm.totals} is returned afterwards"
            )


def check_may_return(make: Callable[[], Algorithm], space: Space) -> None:
    """No group names a trial, as a member or as an origin, that could not return before."""
    for objective in (_noisy, _rarely_fails):
        driver = _AlgorithmDriver(_bound(make, space), objective, gone=set())
        asked = driver.run()
        assert asked == _AlgorithmDriver(_bound(make, space), objective).run(), "`may_return` changes the study"


def check_order_does_not_matter(make: Callable[[], Algorithm], space: Space) -> None:
    """The order of the reports of different trials changes neither budgets nor decisions."""
    for objective in (_noisy, _rarely_fails):
        outcomes = [_AlgorithmDriver(_bound(make, space), objective, order=order).run() for order in range(4)]
        for order, outcome in enumerate(outcomes):
            assert outcome == outcomes[0], f"the order of reports changed the study (orders 0 and {order})"


def check_repeated_reports(make: Callable[[], Algorithm], space: Space) -> None:
    """A repeated report, at once or much later, changes nothing."""
    for objective in (_noisy, _rarely_fails):
        single = _AlgorithmDriver(_bound(make, space), objective).run()
        repeated = _AlgorithmDriver(_bound(make, space), objective, repeat=True).run()
        assert single == repeated, "a repeated report changed the study"


def check_replay(make: Callable[[], Algorithm], space: Space) -> None:
    """A new instance continues after a replay of the recorded calls as the old one would have.

    Of the calls of `next_groups` those are recorded that returned groups.
    """
    for batch in (1, 5):
        complete_run = _AlgorithmDriver(_bound(make, space), _noisy, batch=batch)
        expected = complete_run.run()
        for share in (0.0, 0.3, 0.7, 1.0):
            replayed = _AlgorithmDriver(_bound(make, space), _noisy, batch=batch)
            for call in complete_run.calls[: int(share * len(complete_run.calls))]:
                replayed.repeat_call(call)
            outcome = replayed.run()
            assert outcome == expected, f"after {share:.0%} of its calls were replayed, the study ended otherwise"


def check_extension(make: Callable[[], Algorithm], space: Space, *, synchronous: bool = True) -> None:
    """More trials can be asked for in the middle of a study, at its end, and again; or they are refused by name, and
    nothing changes.
    """
    for objective in (_random, _rarely_fails):
        driver = _AlgorithmDriver(_bound(make, space), objective)
        single = driver.run()
        known = len(single.trials)
        message = _extension_refusal(driver.algorithm, known)
        assert message, f"an extension to {known} trials, which the algorithm has, was accepted"
        assert _search_name(make()) in message, f"the error does not name the algorithm: {message}"
        assert driver.run() == single, "a refused extension changed the study"
        if _extension_refusal(driver.algorithm, known + 1):
            continue
        driver.calls.append(known + 1)
        assert not driver.algorithm.finished, "an extended algorithm has finished"
        extended = driver.run()
        assert len(extended.trials) > known, f"there are {len(extended.trials)} trials after an extension by one"
        assert extended.trials[:known] == single.trials, "an extension at the end changed the trials before"
        assert single.decisions <= extended.decisions, "an extension at the end changed decisions before"
        driver.extend(len(extended.trials) + 1)
        again = driver.run()
        assert len(again.trials) > len(extended.trials), "a second extension adds no trials"
        if (announced := driver.algorithm.totals) is not None and objective is _random:
            assert announced.trials == len(again.trials), f"{announced} are the totals of {len(again.trials)} trials"
        replayed = _AlgorithmDriver(_bound(make, space), objective)
        for call in driver.calls:
            replayed.repeat_call(call)
        assert replayed.run() == again, "after a replay with its extensions, the study ended otherwise"
        for reports in (0, len(single.trials) // 2):
            early = _AlgorithmDriver(_bound(make, space), objective)
            early.ask()
            for _ in range(reports):
                early.train_one()
            early.extend(known + 1)
            outcome = early.run()
            assert outcome.trials[:known] == single.trials, f"an extension after {reports} reports changed trials"
            assert outcome == extended or not synchronous, "what an extended study finds depends on when it is extended"


def _extension_refusal(algorithm: Algorithm, trials: int) -> str:
    """Extend an algorithm; return the refusal, or ""."""
    try:
        algorithm.extend(trials)
    except AlgorithmError as error:
        return str(error)
    return ""


def check_stop_rules(make: Callable[[], Algorithm], space: Space, *, synchronous: bool = True) -> None:
    """The algorithm keeps its contract with stop rules around it; without Patience if it copies trials."""
    algorithm = make()
    rules: list[StopRule] = [Threshold(above=0.95), *([] if algorithm.copies_trials else [Patience(epochs=2)])]
    if not synchronous:
        rules += [Percentile(50, startup=3), *([LossTrend(1, 3)] if algorithm.longest_budget else [])]

    def wrapped() -> Algorithm:
        return StopRules(make(), rules)

    check_failures(wrapped, space)
    check_totals(wrapped, space)
    if synchronous:
        check_order_does_not_matter(wrapped, space)
    check_repeated_reports(wrapped, space)
    check_replay(wrapped, space)
    check_extension(wrapped, space, synchronous=synchronous)
    check_wrong_reports(wrapped, space)


def check_constraints(make: Callable[[], Algorithm], space: Space, *, synchronous: bool = True) -> None:
    """A study with constraints ends by the rules, and continues after a replay, unless the algorithm refuses them."""
    try:
        _bound(make, space, constraints=_BOUNDS)
    except AlgorithmError:
        return
    _check_resumable(lambda: _bound(make, space, constraints=_BOUNDS), synchronous)


def check_earlier(make: Callable[[], Algorithm], space: Space, *, synchronous: bool = True) -> None:
    """A study that begins with trials of earlier ones ends by the rules, and continues after a replay."""
    budgets = make().modelled_budgets
    earlier = []
    for number in range(_EARLIER_TRIALS):
        metrics = {epoch: {_METRIC: _noisy(number, epoch)} for epoch in budgets}
        earlier.append(EarlierTrial(space.sample(number), metrics, stopped=number % 2 > 0))
    if budgets:
        _check_resumable(lambda: _bound(make, space, earlier=earlier), synchronous)


def check_several_metrics(make: Callable[[], Algorithm], space: Space, *, synchronous: bool = True) -> None:
    """A study of two metrics ends by the rules, and continues after a replay; or the algorithm refuses two."""
    if make().takes_several_metrics:
        _check_resumable(lambda: _bound(make, space, metric=[_METRIC, _COST], mode=["min", "max"]), synchronous)
        return
    try:
        _bound(make, space, metric=[_METRIC, _COST], mode=["min", "max"])
    except AlgorithmError:
        return
    raise AssertionError(f"{make()!r} took two metrics, but `takes_several_metrics` is false")


def _check_resumable(bound: Callable[[], Algorithm], synchronous: bool) -> None:
    complete_run = _AlgorithmDriver(bound(), _rarely_fails)
    expected = complete_run.run()
    replayed = _AlgorithmDriver(bound(), _rarely_fails)
    replayed.ask()
    for report in complete_run.reports[: len(complete_run.reports) // 2]:
        replayed.deliver(report)
    assert replayed.run() == expected, "after half of its reports were replayed, the study ended otherwise"
    if synchronous:
        outcome = _AlgorithmDriver(bound(), _rarely_fails, order=1).run()
        assert outcome == expected, "the order of reports changed the study"


def check_wrong_reports(make: Callable[[], Algorithm], space: Space) -> None:
    """Reports of unknown trials, or without the metric, are refused by name."""
    algorithm = _bound(make, space)
    trial = algorithm.next_groups(free=1)[0].trials[0]
    message = _refusal(algorithm, Report(10**9, 1, {_METRIC: 0.0}), AlgorithmError)
    assert str(10**9) in message, f"the error does not name the trial: {message}"
    message = _refusal(algorithm, Report(trial.number, 1, {"loss": 0.0}), TaskError)
    assert _METRIC in message, f"the error does not name the metric asked for: {message}"
    assert "loss" in message, f"the error does not name what is reported: {message}"


def _search_name(algorithm: Algorithm) -> str:
    """The name of the class of an algorithm, or of what it wraps."""
    return _search_name(algorithm.inner) if isinstance(algorithm, WrapperAlgorithm) else type(algorithm).__name__


def _refusal(algorithm: Algorithm, report: Report, kind: type[ShoalError]) -> str:
    try:
        algorithm.observe(report)
    except kind as error:
        return str(error)
    raise AssertionError(f"{report} was accepted and should raise {kind.__name__}")


def _smooth(number: int, epoch: int) -> float:
    """Return a value that falls towards a limit of the trial; many trials are equal."""
    return number % 5 + 1 / epoch


def _noisy(number: int, epoch: int) -> float:
    """Return a pseudo-random value in [0, 1) that depends on the arguments alone; NaN for every eleventh trial."""
    return float("nan") if number % 11 == 3 else _random(number, epoch)


def _random(number: int, epoch: int) -> float:
    """Return a pseudo-random value in [0, 1) that depends on the arguments alone."""
    return derive_seed("noise", number, epoch) / 2**63


def _rarely_fails(number: int, epoch: int) -> float | None:
    """As `_noisy`, but one epoch in eight fails the trial."""
    return None if derive_seed("fail", number, epoch) % 8 == 0 else _noisy(number, epoch)


def _always_fails(number: int, epoch: int) -> None:
    """Fail every trial in its first epoch."""


def _cost(number: int, epoch: int) -> float:
    """Return a pseudo-random value in [0, 1) that depends on the arguments alone; NaN for every thirteenth trial."""
    return float("nan") if number % 13 == 5 else derive_seed("cost", number, epoch) / 2**63


def _always_nan(number: int, epoch: int) -> float:
    return float("nan")


def _bound(
    make: Callable[[], Algorithm],
    space: Space,
    *,
    metric: str | list[str] = _METRIC,
    mode: str | list[str] = "min",
    seed: int = 0,
    data_seed: int | None = None,
    **further: Any,
) -> Algorithm:
    algorithm = make()
    algorithm.bind(space, metric=metric, mode=mode, seed=seed, data_seed=data_seed, **further)
    return algorithm


def _proposed(algorithm: Algorithm) -> list[Trial]:
    trials = [trial for group in algorithm.next_groups(free=1) for trial in group.trials]
    return sorted(trials, key=lambda trial: trial.number)


@dataclass(frozen=True)
class _StudyTrace:
    """The results of a study, in a form that does not depend on their order."""

    stretches: frozenset[tuple[int, Budget]]
    """Every trial with each of its budgets."""
    trials: tuple[Trial, ...]
    decisions: frozenset[Decision]


@dataclass
class _AlgorithmDriver:
    """Runs an algorithm as the engine does, and checks each of its answers."""

    algorithm: Algorithm
    objective: _Objective
    order: int = 0
    repeat: bool = False
    batch: int = 1
    """Number of reports after which further groups are requested, at the latest."""
    trials: dict[int, Trial] = field(default_factory=dict)
    epochs: dict[int, int] = field(default_factory=dict)
    budgets: dict[int, list[Budget]] = field(default_factory=dict)
    training: set[int] = field(default_factory=set)
    failed: set[int] = field(default_factory=set)
    decisions: dict[int, Decision] = field(default_factory=dict)
    reports: list[Report] = field(default_factory=list)
    gone: set[int] | None = None
    """Trials that may not return, as the algorithm says before each proposal; None: it is not asked."""
    calls: list[Report | list[TrialGroup] | int] = field(default_factory=list)
    """What a journal has: reports, groups that were returned, and the arguments of `extend`."""

    def run(self) -> _StudyTrace:
        self.ask_if_due()
        for _ in range(_MAX_EPOCHS):
            if self.algorithm.finished:
                break
            self.train_one()
        else:
            raise AssertionError(f"not finished after {_MAX_EPOCHS} epochs")
        assert not self.training, f"finished while trials {sorted(self.training)} are being trained"
        assert self.algorithm.next_groups(free=100) == [], "finished, but proposes more"
        undecided = self.trials.keys() - self.decisions.keys() - self.failed
        assert not undecided, f"finished without a decision on the trials {sorted(undecided)}"
        numbers = sorted(self.trials)
        assert numbers == list(range(len(numbers))), f"the trials' numbers are not 0, 1, 2, ...: {numbers}"
        return _StudyTrace(
            frozenset((number, budget) for number, budgets in self.budgets.items() for budget in budgets),
            tuple(self.trials[number] for number in numbers),
            frozenset(self.decisions.values()),
        )

    def train_one(self) -> None:
        """Train a trial for an epoch, and deliver its report."""
        assert self.training, "no trial is being trained and none is proposed, yet the algorithm is not finished"
        # The position alone decides, so that a replayed study continues in the same order.
        position = derive_seed(self.order, len(self.reports)) % len(self.training)
        self.deliver(self.train(sorted(self.training)[position]))

    def train(self, number: int) -> Report:
        epoch = self.epochs.get(number, 0) + 1
        value = self.objective(number, epoch)
        if value is None:
            return Report(number, epoch, state=TrialState.FAILED, reason="as the objective says")
        paused = epoch == self.budgets[number][-1].epochs
        metrics = {_METRIC: value, _COST: _cost(number, epoch)}
        return Report(number, epoch, metrics, state=TrialState.PAUSED if paused else TrialState.RUNNING)

    def deliver(self, report: Report) -> None:
        """Give the algorithm a report, and request further groups."""
        self.observe(report)
        if self.repeat:
            again = [report] if report.state is TrialState.RUNNING else self.reports
            for old in again:
                answer = self.algorithm.observe(old)
                assert answer == [], f"the report {old} came again and was answered with {answer}"
        self.ask_if_due()

    def observe(self, report: Report) -> None:
        self.epochs[report.trial] = report.epoch
        if report.state is TrialState.FAILED:
            self.failed.add(report.trial)
        if report.state is not TrialState.RUNNING:
            self.training.discard(report.trial)
        self.reports.append(report)
        self.calls.append(report)
        for decision in self.algorithm.observe(report):
            self._check_decision(decision)

    def ask_if_due(self) -> None:
        if not self.training or len(self.reports) % self.batch == 0:
            self.ask()

    def ask(self) -> None:
        if self.gone is not None:
            self.gone |= {number for number in self.trials if not self.algorithm.may_return(number)}
        if groups := self.algorithm.next_groups(free=4):
            self.calls.append(groups)
        for group in groups:
            self._check_group(group)

    def extend(self, trials: int) -> None:
        self.algorithm.extend(trials)
        self.calls.append(trials)

    def repeat_call(self, call: Report | list[TrialGroup] | int) -> None:
        """Repeat a recorded call."""
        if isinstance(call, int):
            self.extend(call)
        elif isinstance(call, Report):
            self.observe(call)
        else:
            self.ask()
            assert self.calls[-1] == call, f"a replay proposes {self.calls[-1]} in the place of {call}"

    def _check_group(self, group: TrialGroup) -> None:
        assert group.trials, f"the group {group.name!r} is empty"
        for trial in group.trials:
            number = trial.number
            assert number not in (self.gone or ()), f"trial {number} came again, and `may_return` was false"
            if number not in self.trials and trial.origin is not None:
                self._check_origin(trial)
                self.epochs[number] = trial.start
            assert trial == self.trials.setdefault(number, trial), f"trial {number} came again as another trial"
            assert json.loads(json.dumps(trial.config)) == trial.config, f"the config of trial {number} is not JSON"
            assert number not in self.training, f"trial {number} is in two groups at a time"
            assert number not in self.failed, f"trial {number} failed and came again"
            assert number not in self.decisions, f"trial {number} was ended and came again"
            assert group.budget.epochs > trial.start, f"trial {number} begins at {trial.start}, its budget is {group}"
            before = self.budgets.setdefault(number, [])
            assert not before or group.budget.epochs > before[-1].epochs, (
                f"trial {number} came again with {group.budget}, after {before[-1]}"
            )
            before.append(group.budget)
            self.training.add(number)

    def _check_origin(self, trial: Trial) -> None:
        origin = trial.origin
        assert origin is not None
        other = self.trials.get(origin.trial)
        assert other is not None, f"trial {trial.number} starts from {origin}, which was never proposed"
        assert origin.trial not in self.failed, f"trial {trial.number} starts from {origin}, which failed"
        gone = origin.trial in (self.gone or ())
        assert not gone, f"trial {trial.number} starts from {origin}, and `may_return` was false"
        origin_epoch = self.epochs.get(origin.trial, other.start)
        assert origin_epoch == origin.epoch, (
            f"trial {trial.number} starts from {origin}, which is at epoch {origin_epoch}"
        )

    def _check_decision(self, decision: Decision) -> None:
        number = decision.trial
        assert number in self.trials, f"{decision} is about a trial that was never proposed"
        assert decision.state in (TrialState.COMPLETE, TrialState.STOPPED), f"{decision} does not end its trial"
        assert number not in self.decisions, f"{decision} comes after {self.decisions[number]}"
        assert number not in self.failed, f"{decision} is about a trial that failed"
        assert decision.reason or decision.state is TrialState.COMPLETE, f"{decision} gives no reason"
        self.decisions[number] = decision
        self.training.discard(number)
