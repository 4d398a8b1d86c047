"""Studies that are made up from a seed, and disturbed: what has to hold does, and a seed always gives the same."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from simulation_fuzz import DELIBERATE, FAULTY, Deliberate, found_within
from support import random_studies
from support.faults import FAULTS
from support.simulation import simulate

from shoal.plan import job_tracker, partition, views
from shoal.study import planning


@pytest.mark.in_turns(20)
@pytest.mark.parametrize("first", range(0, 200, 10))
def test_what_has_to_hold_of_a_disturbed_study_does(first: int) -> None:
    for seed in range(first, first + 10):
        found = simulate(seed)
        assert not found.violation, f"seed {seed}, with {dict(found.faults)}"
        assert found.trials


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("seed", range(5))
def test_so_it_does_where_more_wait_than_are_planned_for_in_a_turn(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "MAX_ARRAYS", 1)
    monkeypatch.setattr(partition, "MIN_ARRAYS", 1)
    monkeypatch.setattr(partition, "ARRAYS_PER_DEVICE", 1)
    monkeypatch.setattr(planning, "HORIZON", 1)
    monkeypatch.setattr(planning, "CLASSES_PER_DEVICE", 1)
    found = simulate(seed)
    assert not found.violation, f"seed {seed}, with {dict(found.faults)}"


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("first", range(1000, 1020, 5))
def test_so_it_does_where_jobs_grow_at_every_chance(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(random_studies, "POLICY_NAMES", [])
    monkeypatch.setattr(views, "TRIAL_EPOCHS", 1)
    monkeypatch.setattr(job_tracker, "SWITCH_SECONDS", 0.01)
    for seed in range(first, first + 5):
        found = simulate(seed)
        assert not found.violation, f"seed {seed}, with {dict(found.faults)}"


def test_a_seed_gives_the_same_study_and_the_same_faults(tmp_path: Path) -> None:
    one, again = (simulate(7, base=tmp_path) for _ in range(2))
    assert one == again
    assert one.faults
    assert one.faults.keys() <= FAULTS.keys()


@pytest.mark.in_turns  # the quick run of `benchmarks/simulation_fuzz.py` takes them all
@pytest.mark.parametrize("fault", DELIBERATE.values(), ids=DELIBERATE)
def test_a_deliberate_fault_is_found(fault: Deliberate) -> None:
    within, violation = found_within(fault, first=0, most=FAULTY)
    assert 0 < within <= FAULTY
    assert violation
