import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from schedule_samples import cluster, gpu

from shoal.core.errors import PolicyError
from shoal.schedule.oversubscription import WINDOW, OversubscriptionTuner, check_oversubscription

OBSERVATIONS = 120
"""Within which the docstring promises a settled ratio."""


class SimulatedDevice:
    """Delivers promised compute in full up to a limit; beyond it, a little less with every job more."""

    def __init__(self, limit, *, demand=0.25, noise=0.03, overhead=0.02, seed=0):
        self.limit, self.demand, self.noise, self.overhead = limit, demand, noise, overhead
        self._random = random.Random(seed)

    def run(self, ratio, waiting=1000):
        """Demands and speeds of the jobs on it, as many as the ratio allows."""
        count = min(int(ratio / self.demand + 1e-9), waiting)
        promised = count * self.demand
        delivered = min(promised, self.limit - self.overhead * max(0.0, promised - self.limit))
        speed = delivered / promised if promised else 0.0
        return [(self.demand, speed * self._random.gauss(1, self.noise)) for _ in range(count)]


def feed(tuner, devices, observations):
    for _ in range(observations):
        for kind, device in devices.items():
            tuner.observe(kind, device.run(tuner.ratios.get(kind, 1.0)))


def settle(tuner, kind, device):
    """Observe until the ratio is settled; how often that was."""
    count = 0
    while not tuner.settled(kind):
        feed(tuner, {kind: device}, 1)
        count += 1
        assert count <= OBSERVATIONS
    return tuner.ratios[kind]


@pytest.mark.parametrize("seed", range(10))
def test_each_kind_settles_near_the_ratio_that_it_can_deliver(seed):
    tuner = OversubscriptionTuner()
    assert settle(tuner, "H100", SimulatedDevice(2.5, seed=seed)) == pytest.approx(2.5, abs=0.26)
    assert settle(tuner, "A100", SimulatedDevice(3.0, seed=seed)) == pytest.approx(3.0, abs=0.26)
    assert tuner.ratios["H100"] == pytest.approx(2.5, abs=0.26)


@given(st.floats(1.0, 4.0), st.sampled_from((0.1, 0.25, 0.3, 0.5)), st.integers(0, 1000))
@settings(max_examples=50, deadline=None)
def test_wherever_the_limit_is_the_device_delivers_nearly_all_it_can(limit, demand, seed):
    device = SimulatedDevice(limit, demand=demand, noise=0.02, seed=seed)
    ratio = settle(OversubscriptionTuner(), "A100", device)
    delivered = sum(demand * speed for demand, speed in device.run(ratio))
    assert delivered >= 0.75 * limit - demand
    assert ratio <= limit + 1.0


@pytest.mark.parametrize(("before", "after"), [(2.5, 1.5), (1.5, 3.0)], ids=["narrower", "wider"])
def test_a_change_of_the_workload_is_followed(before, after):
    tuner = OversubscriptionTuner()
    settle(tuner, "A100", SimulatedDevice(before))
    changed = SimulatedDevice(after, seed=1)
    while tuner.settled("A100"):
        feed(tuner, {"A100": changed}, 1)
    assert settle(tuner, "A100", changed) == pytest.approx(after, abs=0.3)


def test_ten_settled_searches_differ_by_no_more_than_the_finest_step():
    """Noise alone moves a settled ratio by no more than a step when both directions are tried again."""
    tuner, device = OversubscriptionTuner(), SimulatedDevice(2.5)
    found = []
    for _ in range(10 * OBSERVATIONS):
        feed(tuner, {"A100": device}, 1)
        if tuner.settled("A100"):
            found.append(tuner.ratios["A100"])
    assert max(found) - min(found) <= 0.25


def test_devices_that_no_job_waits_for_keep_their_ratio():
    tuner, device = OversubscriptionTuner(), SimulatedDevice(3.0)
    while not tuner.settled("A100"):
        tuner.observe("A100", device.run(tuner.ratios.get("A100", 1.0), waiting=2))
    assert tuner.ratios["A100"] == 1.0


def test_the_cluster_gets_the_ratio_of_each_kind():
    tuner = OversubscriptionTuner()
    for _ in range(WINDOW):
        tuner.observe("A100", [(1.0, 1.0)])
    where = cluster(gpu(0), gpu(1, kind="H100", oversubscription=2.0))
    assert tuner.apply(where) == cluster(gpu(0, oversubscription=1.5), gpu(1, kind="H100"))
    assert tuner.ratios == {"A100": 1.5}
    assert not tuner.settled("H100")


def test_kinds_that_are_not_tuned_keep_the_ratio_of_the_cluster():
    tuner = OversubscriptionTuner(kinds=("A100",))
    for kind in ("A100", "H100") * WINDOW:
        tuner.observe(kind, [(1.0, 1.0)])
    where = cluster(gpu(0), gpu(1, kind="H100", oversubscription=2.0))
    assert tuner.apply(where) == cluster(gpu(0, oversubscription=1.5), gpu(1, kind="H100", oversubscription=2.0))
    assert tuner.ratios == {"A100": 1.5}


def test_a_search_begins_at_1_and_knows_its_best():
    tuner, device = OversubscriptionTuner(), SimulatedDevice(2.5)
    where = cluster(gpu(0), gpu(1, kind="H100"))
    assert [device.oversubscription for _, device in tuner.apply(where)] == [1.0, 1.0]
    assert tuner.best_ratios == {}
    for _ in range(WINDOW):
        tuner.observe("A100", device.run(tuner.ratio("A100")))
    assert (tuner.best_ratios, tuner.ratio("A100")) == ({"A100": 1.0}, 1.5)
    assert settle(tuner, "A100", device) == pytest.approx(2.5, abs=0.26)
    assert tuner.best_ratios == {"A100": tuner.ratio("A100")}


def test_a_search_begins_at_the_known_ratio_and_goes_down_as_well_as_up():
    tuner = OversubscriptionTuner(known={"A100": 2.5, "H100": 40.0, "V100": 0.3})
    where = cluster(gpu(0), gpu(1, kind="H100"), gpu(2, kind="V100"), gpu(3, kind="T4"))
    assert [device.oversubscription for _, device in tuner.apply(where)] == [2.5, 8.0, 1.0, 1.0]
    assert tuner.best_ratios == {}
    assert settle(tuner, "A100", SimulatedDevice(1.5)) == pytest.approx(1.5, abs=0.26)
    assert settle(tuner, "V100", SimulatedDevice(1.5)) == pytest.approx(1.5, abs=0.26)


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_known_ratio_is_replaced_by_a_settled_one_only(forgotten):
    tuner, device = OversubscriptionTuner(known={"A100": 2.5}), SimulatedDevice(1.5)
    if forgotten:
        tuner.forget("A100")
    for _ in range(2 * WINDOW):
        tuner.observe("A100", device.run(tuner.ratio("A100")))
    assert tuner.best_ratios == {}
    settle(tuner, "A100", device)
    assert tuner.best_ratios == {"A100": pytest.approx(1.5, abs=0.26)}


def test_a_kind_that_began_at_a_known_ratio_begins_again_at_1_and_any_other_keeps_its_ratio():
    tuner = OversubscriptionTuner(known={"A100": 2.5, "H100": 2.5})
    for kind in ("A100", "T4") * WINDOW:
        tuner.observe(kind, [(tuner.ratio(kind), 1.0)])
    assert [tuner.ratio(kind) for kind in ("A100", "H100", "T4")] == [3.0, 2.5, 1.5]
    for _ in range(2):
        for kind in ("A100", "H100", "T4"):
            tuner.forget(kind)
        assert [tuner.ratio(kind) for kind in ("A100", "H100", "T4")] == [1.0, 1.0, 1.5]


def test_a_fixed_ratio_holds_for_all_devices_whatever_is_observed():
    tuner = OversubscriptionTuner(fixed=2.0, known={"A100": 3.0})
    for _ in range(WINDOW):
        tuner.observe("A100", [(1.0, 1.0)])
    where = cluster(gpu(0), gpu(1, kind="H100", oversubscription=1.5))
    assert tuner.apply(where) == cluster(gpu(0, oversubscription=2.0), gpu(1, kind="H100", oversubscription=2.0))
    assert (tuner.ratio("A100"), tuner.tunes("A100"), tuner.best_ratios) == (2.0, False, {})


@pytest.mark.parametrize("value", [0.99, 0, -1, float("nan"), float("inf"), True, "2", None], ids=repr)
def test_ratios_that_a_study_cannot_have(value):
    with pytest.raises(PolicyError, match='`oversubscription` must be "auto" or a number of at least 1, got'):
        check_oversubscription(value, processes=True)


def test_ratios_that_a_study_can_have():
    for value in ("auto", 1, 1.0, 2.5):
        check_oversubscription(value, processes=True)
    for value in ("auto", 1):
        check_oversubscription(value, processes=False)
    with pytest.raises(PolicyError, match=r"oversubscription=1.5 needs a process for each job; use backend='local'"):
        check_oversubscription(1.5, processes=False)


def test_the_same_observations_give_the_same_ratios():
    def ratios():
        tuner, device = OversubscriptionTuner(), SimulatedDevice(2.5, seed=3)
        for _ in range(OBSERVATIONS):
            feed(tuner, {"A100": device}, 1)
            yield tuner.ratios["A100"]

    assert list(ratios()) == list(ratios())


@pytest.mark.parametrize("pair", [(-0.1, 1.0), (0.5, float("nan"))], ids=str)
def test_impossible_observations_are_refused(pair):
    with pytest.raises(PolicyError, match="job on A100 has demand"):
        OversubscriptionTuner().observe("A100", [pair])
