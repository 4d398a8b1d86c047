import dataclasses

import pytest

from shoal.algorithms import (
    ALGORITHMS,
    ASHA,
    BOHB,
    PBT,
    Grid,
    Hyperband,
    Median,
    OptunaSearch,
    Random,
    SuccessiveHalving,
    SyncBOHB,
    Totals,
)
from shoal.core.space import Space, choice, loguniform, randint, uniform
from shoal.core.trial import Budget, Decision, Origin, TrialGroup, TrialState, derive_seed
from shoal.testing import check_algorithm
from shoal.testing.algorithms import check_may_return

MIXED = Space(
    {"lr": loguniform(1e-4, 1), "optimizer": choice([{"name": "sgd", "momentum": uniform(0, 1)}, {"name": "adam"}])}
)
DISCRETE = Space({"width": choice([16, 32, 64]), "depth": randint(1, 6)})

CASES = {
    "grid": (lambda: Grid(epochs=3), DISCRETE),
    "random": (lambda: Random(n=25, epochs=3), MIXED),
    "random, compared early": (lambda: Random(n=9, epochs=3, compare_after=1), MIXED),
    "hyperband": (lambda: Hyperband(max_epochs=9), MIXED),
    "hyperband, eta 2": (lambda: Hyperband(max_epochs=11, eta=2), MIXED),
    "hyperband, last rungs skipped": (lambda: Hyperband(max_epochs=9, skip_last=1), MIXED),
    "hyperband, one bracket": (lambda: Hyperband(max_epochs=27, brackets=1), MIXED),
    "successive_halving": (lambda: SuccessiveHalving(n=20, max_epochs=9), MIXED),
    "successive_halving of two": (lambda: SuccessiveHalving(n=2, max_epochs=10, eta=2, min_epochs=2), MIXED),
    "sync_bohb": (lambda: SyncBOHB(max_epochs=9, brackets=5), MIXED),
    "sync_bohb, from two epochs": (lambda: SyncBOHB(max_epochs=9, eta=2, min_epochs=2, random_fraction=0), DISCRETE),
    "pbt": (lambda: PBT(n=10, epochs=6), MIXED),
    "pbt, every four epochs": (lambda: PBT(n=5, epochs=11, interval=4, truncation=0.5, resample=0.5), DISCRETE),
    "pbt, nobody is replaced": (lambda: PBT(n=2, epochs=3, truncation=0), MIXED),
    "pbt, options too": (
        lambda: PBT(n=6, epochs=4, resample=0, explored=["optimizer", "optimizer[0].momentum"]),
        MIXED,
    ),
    "random, grouped": (lambda: Random(n=25, epochs=3, group_by=["optimizer.name"]), MIXED),
}
ASYNCHRONOUS = {
    "asha": (lambda: ASHA(n=40, max_epochs=9, concurrency=8), MIXED),
    "asha, stopping": (lambda: ASHA(n=40, max_epochs=9, concurrency=8, variant="stopping"), MIXED),
    "asha, one by one": (lambda: ASHA(n=10, max_epochs=11, eta=2, min_epochs=2, concurrency=1), MIXED),
    "asha, fewer than eta": (lambda: ASHA(n=2, max_epochs=9), MIXED),
    "asha, tpe": (lambda: ASHA(n=20, max_epochs=9, concurrency=4, sampler="tpe"), MIXED),
    "asha, stopping, nsga2": (
        lambda: ASHA(n=20, max_epochs=9, concurrency=4, variant="stopping", sampler="nsga2"),
        MIXED,
    ),
    "asha, grouped": (lambda: ASHA(n=40, max_epochs=9, concurrency=8, group_by=["width"]), DISCRETE),
    "bohb": (lambda: BOHB(max_epochs=9, brackets=5), MIXED),
    "bohb, one by one": (lambda: BOHB(max_epochs=9, concurrency=1, random_fraction=0), MIXED),
    "bohb, eta 2": (lambda: BOHB(max_epochs=11, eta=2, samples=4, concurrency=20, group_by=["depth"]), DISCRETE),
    "median": (lambda: Median(n=30, epochs=5, concurrency=6), MIXED),
    "median, every two epochs": (lambda: Median(n=20, epochs=7, interval=2, grace=4, least=1, concurrency=9), MIXED),
    "optuna": (lambda: OptunaSearch(n=16, epochs=3, concurrency=3), MIXED),
    "optuna, random": (lambda: OptunaSearch(n=12, epochs=2, sampler="random", concurrency=20), MIXED),
}


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("case", CASES)
def test_our_algorithms_conform(case):
    check_algorithm(*CASES[case])


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("case", ASYNCHRONOUS)
def test_our_asynchronous_algorithms_conform(case):
    check_algorithm(*ASYNCHRONOUS[case], synchronous=False)


def test_every_algorithm_is_checked():
    assert set(ALGORITHMS) <= {*CASES, *ASYNCHRONOUS}


class SkipsANumber(Random):
    def next_groups(self, free):
        return [
            dataclasses.replace(group, trials=tuple(t for t in group.trials if t.number != 4))
            for group in super().next_groups(free)
        ]


class ProposesTwice(Random):
    def next_groups(self, free):
        return super().next_groups(free) * 2


class AsksForMoreOfAnEndedTrial(Random):
    ended = ()

    def observe(self, report):
        decisions = super().observe(report)
        self.ended = tuple(self.known[d.trial] for d in decisions)
        return decisions

    def next_groups(self, free):
        if self.ended:
            return [TrialGroup(self.ended, Budget(9))]
        groups = super().next_groups(free)
        self.known = {t.number: t for group in groups for t in group.trials} or self.known
        return groups


class DoesNotDecide(Random):
    def observe(self, report):
        super().observe(report)
        return []


class DecidesOnStrangers(Random):
    def observe(self, report):
        return [*super().observe(report), Decision(999, TrialState.COMPLETE)]


class DecidesWithoutEnd(Random):
    def observe(self, report):
        return [dataclasses.replace(d, state=TrialState.PAUSED) for d in super().observe(report)]


class StopsWithoutReason(Random):
    def observe(self, report):
        return [dataclasses.replace(d, state=TrialState.STOPPED) for d in super().observe(report)]


class NeverFinishes(Random):
    @property
    def finished(self):
        return False


class FinishesEarly(Random):
    @property
    def finished(self):
        return True


class IgnoresTheSeed(Random):
    def bind(self, space, *, seed, **rest):
        super().bind(space, seed=0, **rest)


class IgnoresTheDataSeed(Random):
    def bind(self, space, *, data_seed, **rest):
        super().bind(space, data_seed=None, **rest)


class TakesTheFirst(Random):
    """Stops all that pause after the third."""

    ended = 0

    def observe(self, report):
        decisions = super().observe(report)
        self.ended += len(decisions)
        return [
            dataclasses.replace(d, state=TrialState.STOPPED, reason="late") if self.ended > 3 else d for d in decisions
        ]


class AnswersAgain(Random):
    def observe(self, report):
        super().observe(report)
        return [Decision(report.trial, TrialState.COMPLETE)] if report.state is TrialState.PAUSED else []


class SeedsByChance(Random):
    bound = 0

    def bind(self, space, *, seed, **rest):
        SeedsByChance.bound += 1
        super().bind(space, seed=derive_seed(seed, SeedsByChance.bound), **rest)


class AcceptsStrangers(Random):
    def observe(self, report):
        return super().observe(report) if report.trial < 1000 else []


class AcceptsAnyMetric(Random):
    def observe(self, report):
        return super().observe(dataclasses.replace(report, metrics={"score": 0.0}))


class SaysFewer(Random):
    @property
    def totals(self):
        return Totals(12, 24, 24)


class ForgetsWhatItSaid(Random):
    @property
    def totals(self):
        return None if self.finished else super().totals


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        pytest.param(SkipsANumber, "no trial is being trained and none is proposed", id="SkipsANumber"),
        pytest.param(ProposesTwice, "in two groups at a time", id="ProposesTwice"),
        pytest.param(AsksForMoreOfAnEndedTrial, "was ended and came again", id="AsksForMoreOfAnEndedTrial"),
        pytest.param(DoesNotDecide, "finished without a decision", id="DoesNotDecide"),
        pytest.param(DecidesOnStrangers, "never proposed", id="DecidesOnStrangers"),
        pytest.param(DecidesWithoutEnd, "does not end its trial", id="DecidesWithoutEnd"),
        pytest.param(StopsWithoutReason, "gives no reason", id="StopsWithoutReason"),
        pytest.param(NeverFinishes, "yet the algorithm is not finished", id="NeverFinishes"),
        pytest.param(FinishesEarly, "finished while trials", id="FinishesEarly"),
        pytest.param(IgnoresTheSeed, "another seed", id="IgnoresTheSeed"),
        pytest.param(IgnoresTheDataSeed, "the data seed given was 7", id="IgnoresTheDataSeed"),
        pytest.param(TakesTheFirst, "the order of reports changed the study", id="TakesTheFirst"),
        pytest.param(AnswersAgain, "came again and was answered", id="AnswersAgain"),
        pytest.param(SeedsByChance, "the same seed gave different trials", id="SeedsByChance"),
        pytest.param(SaysFewer, "Totals.* was announced, 36 epochs were requested", id="SaysFewer"),
        pytest.param(ForgetsWhatItSaid, "was announced, None is returned afterwards", id="ForgetsWhatItSaid"),
        pytest.param(AcceptsStrangers, "was accepted and should raise AlgorithmError", id="AcceptsStrangers"),
        pytest.param(AcceptsAnyMetric, "was accepted and should raise TaskError", id="AcceptsAnyMetric"),
    ],
)
def test_the_suite_finds_what_breaks_the_contract(broken, message):
    with pytest.raises(AssertionError, match=message):
        check_algorithm(lambda: broken(n=12, epochs=3), MIXED)


class CopiesAnEndedTrial(Random):
    copies_trials = True
    ended = ()

    def may_return(self, number):
        return False

    def observe(self, report):
        decisions = super().observe(report)
        self.ended = self.ended or tuple(decisions)
        return decisions

    def next_groups(self, free):
        if not self.ended:
            return super().next_groups(free)
        origin = Origin(self.ended[0].trial, self.epochs)
        return [TrialGroup((self.problem.trial(self.n, {}, origin),), Budget(self.epochs + 1))]


class ForgetsPromoted(SuccessiveHalving):
    def may_return(self, number):
        return False


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(
            lambda: CopiesAnEndedTrial(5, 2), "starts from Origin.* and `may_return` was false", id="an origin"
        ),
        pytest.param(lambda: ForgetsPromoted(6, 4), "came again, and `may_return` was false", id="a member"),
    ],
)
def test_the_suite_finds_a_trial_that_returns_though_it_may_not(make, message):
    with pytest.raises(AssertionError, match=message):
        check_may_return(make, MIXED)


@pytest.mark.parametrize(
    ("make", "space", "totals"),
    [
        pytest.param(lambda: Grid(epochs=3), DISCRETE, Totals(15, 45, 45), id="grid"),
        pytest.param(lambda: Random(n=25, epochs=3), MIXED, Totals(25, 75, 75), id="random"),
        pytest.param(lambda: Hyperband(9), MIXED, Totals(17, 69, 69), id="hyperband"),
        pytest.param(lambda: SuccessiveHalving(n=20, max_epochs=9), MIXED, Totals(20, 44, 44), id="halving"),
        pytest.param(lambda: BOHB(max_epochs=9), MIXED, Totals(17, 69, 69), id="bohb"),
        pytest.param(lambda: SyncBOHB(max_epochs=9, brackets=4), MIXED, Totals(26, 90, 90), id="sync_bohb"),
        pytest.param(lambda: PBT(n=10, epochs=6), MIXED, Totals(20, 60, 60), id="pbt"),
        pytest.param(lambda: OptunaSearch(n=16, epochs=3), MIXED, Totals(16, 48, 48), id="optuna"),
        pytest.param(lambda: ASHA(n=40, max_epochs=9), MIXED, Totals(40, 90, 360), id="asha"),
        pytest.param(lambda: ASHA(n=2, max_epochs=9), MIXED, Totals(2, 10, 18), id="asha, one gets to the end"),
        pytest.param(
            lambda: ASHA(n=40, max_epochs=9, variant="stopping"), MIXED, Totals(40, 56, 360), id="asha, stopping"
        ),
        pytest.param(
            lambda: Median(n=20, epochs=7, interval=2, grace=3), MIXED, Totals(20, 80, 140), id="median, after grace"
        ),
    ],
)
def test_totals_are_known_beforehand(make, space, totals):
    algorithm = make()
    algorithm.bind(space, metric="score", mode="min", seed=0)
    assert algorithm.totals == totals
