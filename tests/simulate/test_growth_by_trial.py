"""How many devices a job gets is found by trial: studies in which growing pays, gains nothing, or does harm."""

from dataclasses import replace

import pytest
from simulate_samples import cluster, simulation, structure

from shoal.plan.array_packer import ArrayPacker
from shoal.plan.packing.registry import make_packing
from shoal.plan.schedule import Auto, Fifo, WaterFilling

EPOCHS = 20


def ran(policy, spreading, devices=3, jobs=2):
    """The end of a study of jobs of one structure, nothing of which is known at the start.

    Args:
        policy: Policy of the study.
        spreading: Number of devices -> time of a step on them, relative to one.
        devices: Number of devices.
        jobs: Number of jobs, the last of which has epochs of three times the length.
    """
    some = [structure("net", seconds=1.0), structure("long", seconds=3.0)][-jobs:]
    some = [replace(x, profiles={k: replace(p, spreading=spreading) for k, p in x.profiles.items()}) for x in some]
    apart = {"packer": ArrayPacker(make_packing("none")), "fuse": False}
    return simulation(some, cluster(devices), policy, epochs=EPOCHS, measured=False, **apart).run()


@pytest.mark.parametrize("policy", [Auto(), WaterFilling()], ids=["auto", "water_filling"])
@pytest.mark.parametrize(
    ("spreading", "least"),
    [({2: 0.6, 3: 0.45}, 1.7), ({2: 0.9, 3: 1.0}, 1.03), ({2: 1.0}, 0.98), ({2: 2.0}, 0.93)],
    ids=["each pays", "the second one pays a little", "nothing is gained", "it does harm"],
)
def test_growth_found_by_trial_against_one_device_a_job(policy, spreading, least):
    alone, grown = ran(Fifo(), spreading), ran(policy, spreading)
    assert len(grown.completion) == len(alone.completion) == 2
    assert alone.makespan / grown.makespan >= least
    assert grown.switches == alone.switches == 0, "no job was moved"


def test_a_device_that_does_not_pay_is_tried_once_for_a_structure():
    intervals = ran(WaterFilling(), {2: 1.5}, jobs=1).intervals
    assert len([x for x in intervals if x.device != intervals[-1].device]) == 1
