"""Small tables with round numbers, so that every expectation can be worked out by hand."""

from pathlib import Path

import pytest

from shoal.core.device import Cluster, Device, Node
from shoal.simulate.run import Simulation
from shoal.simulate.slowdown import SLOWDOWNS
from shoal.simulate.tables import profile_of_costs
from shoal.simulate.workload import ListedJobs, SimulatedModel, SimulatedWorkload

ROOT = Path(__file__).parents[2]
REAL = ROOT / "../shared/data"
GB = 10**9

SLICES = """job,batch_size,memory_mb,sm_utilisation_percent,power_w,iteration_s_1g,iteration_s_2g,iteration_s_3g,iteration_s_4g,iteration_s_7g
light,1,1000,25,60,0.2,0.1,0.1,0.1,0.1
heavy,1,1000,100,60,0.7,0.35,0.2333333333333333,0.175,0.1
large,1,20000,50,60,,,,0.2,0.1
"""  # noqa: E501

DEVICE = Device("gpu", "A100", 80 * GB)


def tables(folder):
    (folder / "a100_mig_slices.csv").write_text(SLICES)
    return folder


def structure(name, workload="", *, compute=1.0, seconds=10.0, memory=1.0, cores=1.0, kind="A100", fused=None, **costs):
    takes = profile_of_costs(seconds, compute, int(memory * GB), cores, fused or {})
    return SimulatedModel(name, {kind: takes}, workload, **{"start_seconds": 0.0, "switch_seconds": 0.0, **costs})


def simulation(jobs, where, policy, *, arrivals=None, epochs=1, slowdown="none", data=None, **more):
    """Of one source, or of structures, each a job of so many epochs; they are called job/0, job/1, ..."""
    listed = (
        jobs if isinstance(jobs, ListedJobs) else ListedJobs("job", jobs, arrivals or [0.0] * len(jobs), epochs=epochs)
    )
    by_name = {each.name: each for each in listed.structures}
    model = SLOWDOWNS[slowdown](by_name, data) if isinstance(slowdown, str) else slowdown
    return Simulation(SimulatedWorkload([listed]), where, policy, model, **more)


def cluster(devices=1, *, memory=80, cores=64, kind="A100", oversubscription=1.0):
    each = (Device(f"gpu{i}", kind, memory * GB, oversubscription=oversubscription) for i in range(devices))
    return Cluster((Node("n0", cores, tuple(each)),))


needs_data = pytest.mark.skipif(not REAL.is_dir(), reason=f"{REAL} is not there")
