"""How many jobs share a device is found by trial: studies in which that pays, makes no difference, or does harm."""

import pytest
from simulate_samples import cluster, simulation, structure

from shoal.plan.array_packer import ArrayPacker
from shoal.plan.packing.registry import make_packing
from shoal.plan.schedule import Fifo, WaterFilling

EPOCHS = 20


def makespan(policy, slowdown, devices=2, jobs=12):
    """Of jobs of one structure, which take all of a device by their counters but a tenth.

    Args:
        policy: Policy of the study.
        slowdown: Number of jobs on a device -> factor by which each takes longer than alone.
        devices: Number of devices.
        jobs: Number of jobs.
    """

    def speeds(device, here):
        return [1 / slowdown[min(len(here), 3)]] * len(here)

    apart = {"packer": ArrayPacker(make_packing("none")), "fuse": False}
    some = [structure("net", compute=0.9, seconds=1.0)] * jobs
    found = simulation(some, cluster(devices), policy, epochs=EPOCHS, slowdown=speeds, **apart).run()
    assert len(found.completion) == jobs
    return found.makespan


@pytest.mark.parametrize(
    ("slowdown", "least"),
    [({1: 1.0, 2: 1.1, 3: 1.6}, 1.5), ({1: 1.0, 2: 2.0, 3: 3.0}, 0.97), ({1: 1.0, 2: 3.0, 3: 9.0}, 0.9)],
    ids=["a second one pays", "nothing is gained", "it does harm"],
)
def test_sharing_found_by_trial_against_one_job_per_device(slowdown, least):
    assert makespan(Fifo(), slowdown) / makespan(WaterFilling(), slowdown) >= least
