"""ASHA on cases worked out by hand, and against the paper's pseudo-code done the slow way."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.algorithms.asha import ASHA, _SetRung
from shoal.algorithms.successive_halving import SuccessiveHalving
from shoal.core.errors import AlgorithmError
from shoal.core.score import Score, order, worst_score
from shoal.core.space import Space, uniform
from shoal.core.trial import Decision, Report, TrialState

NAN = float("nan")


def bound(algorithm, mode="min"):
    algorithm.bind(Space({"x": uniform(0, 1)}), metric="loss", mode=mode, seed=5, data_seed=1)
    return algorithm


def asked(algorithm):
    """(trial, epochs) of all that is proposed."""
    groups = algorithm.next_groups(free=1)
    return [(trial.number, group.budget.epochs) for group in groups for trial in group.trials]


def told(algorithm, number, epoch, loss):
    return algorithm.observe(Report(number, epoch, {"loss": loss}, state=TrialState.PAUSED))


def test_promotion():
    """Nine trials, two at a time: the best of three continues as soon as there are three, and not before."""
    algorithm = bound(ASHA(9, max_epochs=9, concurrency=2))
    assert asked(algorithm) == [(0, 1), (1, 1)]
    steps = [
        ((0, 1, 0.5), [(2, 1)]),
        ((1, 1, 0.4), [(3, 1)]),
        ((2, 1, 0.6), [(1, 3)]),  # 1 is the best of three
        ((3, 1, 0.1), [(3, 3)]),  # and 3 of four
        ((1, 3, 0.3), [(4, 1)]),
        ((4, 1, 0.9), [(5, 1)]),
        ((5, 1, 0.8), [(6, 1)]),  # two of six may continue, and have: 3 and 1
        ((3, 3, 0.2), [(7, 1)]),
        ((6, 1, 0.7), [(8, 1)]),
        ((7, 1, 0.45), []),
        ((8, 1, 0.35), [(8, 3)]),  # three of nine: 3, 8, 1
        ((8, 3, 0.15), [(8, 9)]),  # one of three
    ]
    for report, expected in steps:
        assert told(algorithm, *report) == []
        assert asked(algorithm) == expected
    assert not algorithm.finished
    decisions = told(algorithm, 8, 9, 0.1)
    assert decisions[0] == Decision(8, TrialState.COMPLETE)
    assert [(each.trial, each.reason) for each in decisions[1:]] == [
        (7, "rank 4 of 9 at epoch 1; the best 3 continue"),
        (0, "rank 5 of 9 at epoch 1; the best 3 continue"),
        (2, "rank 6 of 9 at epoch 1; the best 3 continue"),
        (6, "rank 7 of 9 at epoch 1; the best 3 continue"),
        (5, "rank 8 of 9 at epoch 1; the best 3 continue"),
        (4, "rank 9 of 9 at epoch 1; the best 3 continue"),
        (3, "rank 2 of 3 at epoch 3; only the best continues"),
        (1, "rank 3 of 3 at epoch 3; only the best continues"),
    ]
    assert algorithm.finished


def test_stopping():
    """Whoever comes to a rung is compared with those that came before."""
    algorithm = bound(ASHA(6, max_epochs=4, eta=2, concurrency=1, variant="stopping"), mode="max")
    assert asked(algorithm) == [(0, 1)]
    steps = [
        ((0, 1, 0.5), [], [(0, 2)]),  # the first is compared with nobody
        ((0, 2, 0.6), [], [(0, 4)]),
        ((0, 4, 0.7), [Decision(0, TrialState.COMPLETE)], [(1, 1)]),
        ((1, 1, 0.4), [Decision(1, TrialState.STOPPED, "rank 2 of 2 at epoch 1; only the best continues")], [(2, 1)]),
        ((2, 1, 0.9), [], [(2, 2)]),
        ((2, 2, 0.5), [Decision(2, TrialState.STOPPED, "rank 2 of 2 at epoch 2; only the best continues")], [(3, 1)]),
        ((3, 1, NAN), [Decision(3, TrialState.STOPPED, "loss is nan at epoch 1")], [(4, 1)]),
        ((4, 1, 0.6), [], [(4, 2)]),  # two of five, NaN being the worst
    ]
    for report, decided, expected in steps:
        assert told(algorithm, *report) == decided
        assert asked(algorithm) == expected


def test_one_gets_to_the_end_however_few_there_are():
    algorithm = bound(ASHA(2, max_epochs=9))
    assert asked(algorithm) == [(0, 1), (1, 1)]
    assert told(algorithm, 0, 1, 0.5) == []
    assert told(algorithm, 1, 1, 0.4) == []
    assert asked(algorithm) == [(1, 3)]
    assert told(algorithm, 1, 3, 0.4) == []
    assert asked(algorithm) == [(1, 9)]
    assert told(algorithm, 1, 9, 0.4) == [
        Decision(1, TrialState.COMPLETE),
        Decision(
            0,
            TrialState.STOPPED,
            "rank 2 of 2 at epoch 1; of fewer than 3 trials the best continues only if no trial has reached epoch 9",
        ),
    ]
    assert algorithm.finished


@pytest.mark.parametrize("bad", [NAN, None], ids=["NaN", "failure"])
def test_what_ends_badly_on_the_last_rung_has_not_got_to_the_end(bad):
    algorithm = bound(ASHA(2, max_epochs=3))
    asked(algorithm)
    told(algorithm, 0, 1, 0.5)
    told(algorithm, 1, 1, 0.4)
    assert asked(algorithm) == [(1, 3)]
    if bad is None:
        assert algorithm.observe(Report(1, 3, state=TrialState.FAILED, reason="bad luck")) == []
    else:
        assert told(algorithm, 1, 3, bad) == [Decision(1, TrialState.COMPLETE)]
    assert asked(algorithm) == [(0, 3)]
    assert told(algorithm, 0, 3, 0.5) == [Decision(0, TrialState.COMPLETE)]
    assert algorithm.finished


def test_the_next_best_takes_the_place_of_one_that_fails():
    algorithm = bound(ASHA(2, max_epochs=3))
    asked(algorithm)
    told(algorithm, 0, 1, 0.5)
    told(algorithm, 1, 1, 0.4)
    assert asked(algorithm) == [(1, 3)]
    assert algorithm.observe(Report(1, 2, state=TrialState.FAILED, reason="bad luck")) == []
    assert asked(algorithm) == [(0, 3)]


def by_the_paper(losses, order, max_epochs, eta, concurrency):
    """Algorithm 2 of Li et al. 2020 word by word, all searched anew each time: the jobs in the order they are begun.

    Args:
        losses: rung -> trial -> loss there.
        order: which of the running jobs ends next, as a number modulo theirs.
    """
    last = len(losses) - 1
    rungs = [{} for _ in losses]
    promoted = [set() for _ in losses]
    budgets = [min(eta**level, max_epochs) for level in range(last + 1)]
    jobs, running, begun, n = [], [], 0, len(losses[0])

    def next_job():
        nonlocal begun
        for level in range(last - 1, -1, -1):
            best = sorted(rungs[level], key=lambda trial: (rungs[level][trial], trial))[: len(rungs[level]) // eta]
            candidates = [trial for trial in best if trial not in promoted[level]]
            if candidates:
                promoted[level].add(candidates[0])
                return candidates[0], level + 1
        if begun < n:
            begun += 1
            return begun - 1, 0
        return None

    position = 0
    while True:
        while len(running) < concurrency and (job := next_job()) is not None:
            running.append(job)
            jobs.append((job[0], budgets[job[1]]))
        if not running:
            return jobs
        trial, level = running.pop(order[position % len(order)] % len(running))
        position += 1
        rungs[level][trial] = losses[level][trial]


@given(
    losses=st.integers(1, 40).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 9), min_size=n, max_size=n), min_size=4, max_size=4)
    ),
    order=st.lists(st.integers(0, 30), min_size=1, max_size=20),
    eta=st.integers(2, 4),
    concurrency=st.integers(1, 9),
)
def test_promotions_are_those_of_the_paper(losses, order, eta, concurrency):
    max_epochs = eta**3
    expected = by_the_paper(losses, order, max_epochs, eta, concurrency)
    algorithm = bound(ASHA(len(losses[0]), max_epochs, eta, concurrency=concurrency))
    jobs, running, position = [], [], 0
    while True:
        new = asked(algorithm)
        running += new
        jobs += new
        if not running:
            break
        trial, epochs = running.pop(order[position % len(order)] % len(running))
        position += 1
        level = [1, eta, eta**2, eta**3].index(epochs)
        told(algorithm, trial, epochs, losses[level][trial])
    assert algorithm.finished
    assert jobs[: len(expected)] == expected
    rest = jobs[len(expected) :]
    assert not rest or max_epochs not in {epochs for _, epochs in expected}, "more only where none got to the end"


_SCORE = st.tuples(st.booleans(), st.sampled_from([0.0, 0.0, 0.5, 1.0]), *[st.integers(0, 3).map(float)] * 2)


@given(st.lists(_SCORE, min_size=1, max_size=16), st.lists(st.booleans(), min_size=16, max_size=16))
def test_a_rung_of_several_metrics_is_ranked_as_the_order_of_all_its_trials(scores, pops):
    rung, known, waiting = _SetRung(1), {}, set()
    for number, (is_nan, violation, *losses) in enumerate(scores):
        known[number] = worst_score(2) if is_nan else Score(False, violation, tuple(losses))
        rung.add(number, known[number])
        if not is_nan:
            rung.pause(number)
            waiting.add(number)
        ranking = order(known)
        best = next(((rank, each) for rank, each in enumerate(ranking) if each in waiting), None)
        assert rung.best_paused == best
        assert [rung.rank(each) for each in ranking] == list(range(rung.count))
        if best is not None and pops[number]:
            assert rung.pop_best() == best[1]
            waiting.remove(best[1])
        assert (rung.best_paused is not None) == bool(waiting)
    assert rung.pop_all() == [number for number in order(known) if number in waiting]
    assert rung.best_paused is None


HALVINGS = {
    "as in the paper": ((27, 27), [(27, 1), (9, 3), (3, 9), (1, 27)]),
    "no power of eta": ((20, 10, 2), [(20, 1), (10, 2), (5, 4), (2, 8), (1, 10)]),
    "at least one": ((2, 27), [(2, 1), (1, 3), (1, 9), (1, 27)]),
    "from two epochs": ((8, 8, 2, 2), [(8, 2), (4, 4), (2, 8)]),
    "one rung": ((8, 4, 2, 4), [(8, 4)]),
}


@pytest.mark.parametrize(("settings", "rungs"), HALVINGS.values(), ids=HALVINGS)
def test_successive_halving(settings, rungs):
    algorithm = bound(SuccessiveHalving(*settings))
    found = []
    while jobs := asked(algorithm):
        found.append((len(jobs), jobs[0][1]))
        for number, epochs in jobs:
            told(algorithm, number, epochs, number)
    assert found == rungs
    assert algorithm.finished


@pytest.mark.parametrize(
    ("make", "settings", "message"),
    [
        (ASHA, {"n": 0, "max_epochs": 9}, "`n` must be an integer of at least 1, got 0"),
        (ASHA, {"n": 9, "max_epochs": 9, "eta": 1}, "`eta` must be an integer of at least 2, got 1"),
        (ASHA, {"n": 9, "max_epochs": 9, "eta": 1.5}, "`eta` must be an integer of at least 2, got 1.5"),
        (
            ASHA,
            {"n": 9, "max_epochs": 9, "min_epochs": 10},
            "`min_epochs` must be at most `max_epochs`, got 10 and 9; exchange them",
        ),
        (ASHA, {"n": 9, "max_epochs": 9, "concurrency": 0}, "`concurrency` must be an integer of at least 1, got 0"),
        (
            ASHA,
            {"n": 9, "max_epochs": 9, "variant": "hasty"},
            "`variant` must be one of promotion, stopping, got 'hasty'",
        ),
        (SuccessiveHalving, {"n": True, "max_epochs": 9}, "`n` must be an integer of at least 1, got True"),
        (SuccessiveHalving, {"n": 9, "max_epochs": 0}, "`max_epochs` must be an integer of at least 1, got 0"),
    ],
    ids=str,
)
def test_bad_settings(make, settings, message):
    with pytest.raises(AlgorithmError) as error:
        make(**settings)
    assert str(error.value) == message


def test_it_has_to_be_bound():
    with pytest.raises(AlgorithmError, match=r"call bind\(...\) first"):
        ASHA(9, max_epochs=9).next_groups(free=1)
