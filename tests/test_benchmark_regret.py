"""The benchmark of regret trains searches epoch by epoch, and gives those of other libraries the same random trials."""

import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("optuna")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from optuna.pruners import NopPruner, SuccessiveHalvingPruner
from regret import stopped
from rival_searches import Optuna, SyneTune
from surrogates import EPOCHS, ShoalSearch, losses_of

from shoal.algorithms import ASHA, Random


def constant(number, place):
    return np.full(EPOCHS + 1, float(number))


def test_trials_are_trained_in_turns_until_the_search_ends() -> None:
    search = ShoalSearch(ASHA(3, max_epochs=3, concurrency=2), seed=0)
    assert losses_of(search, constant, workers=2) == [0, 1, 2, 0, 0]  # the best of three is promoted
    search = ShoalSearch(Random(3, epochs=2), seed=0)
    assert losses_of(search, constant, workers=2) == [0, 1, 0, 1, 2, 2]
    assert losses_of(ShoalSearch(Random(3, epochs=2), seed=0), constant, workers=2, budget=3) == [0, 1, 0]


@pytest.mark.parametrize("library", ["optuna", "syne_tune"])
def test_random_trials_are_the_same_in_all_libraries(library: str) -> None:
    pytest.importorskip(library)
    rival = Optuna(NopPruner(), 7, is_random=True) if library == "optuna" else SyneTune("ASHA", 7, is_random=True)
    ours = ShoalSearch(Random(3, EPOCHS), seed=7)
    for number in range(3):
        (own, place), (other, its_place) = ours.ask(), rival.ask()
        assert own == other == number
        np.testing.assert_allclose(place, its_place)


def test_a_rival_stops_the_worse_trials_at_rungs_and_ends_the_others() -> None:
    rival = Optuna(SuccessiveHalvingPruner(1, 3), 0, is_random=True)
    assert [rival.ask()[0] for _ in range(2)] == [0, 1]
    assert rival.tell(0, 1, 0.5) == []
    assert rival.tell(1, 1, 0.6) == [1]
    assert [rival.tell(0, epoch, 0.5) for epoch in (2, EPOCHS)] == [[], [0]]


def test_samples_are_saved_and_the_best_trial_missed() -> None:
    late = [1.0] * 8 + [0.0]  # begins worse than all others
    curves = [late, *[[0.5 + number / 1000] * 9 for number in range(63)]]
    saved, regret = stopped("Median, grace 5", curves, 0)
    assert 0 < saved <= 4 / 9  # of the trials that are stopped once the grace is over
    assert regret > 0
    saved, regret = stopped("ASHA", curves, 0)
    assert saved > 0.5
    assert 0.9 < regret < 1
