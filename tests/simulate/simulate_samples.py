"""Small tables with round numbers, so that every expectation can be worked out by hand."""

from pathlib import Path

import pytest

from shoal.backend.simulated import SimulatedJob, Tenant
from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device, Node

ROOT = Path(__file__).parents[2]
REAL = ROOT / "../shared/data"
GB = 10**9

SLICES = """job,batch_size,memory_mb,sm_utilisation_percent,power_w,iteration_s_1g,iteration_s_2g,iteration_s_3g,iteration_s_4g,iteration_s_7g
light,1,1000,25,60,0.2,0.1,0.1,0.1,0.1
heavy,1,1000,100,60,0.7,0.35,0.2333333333333333,0.175,0.1
large,1,20000,50,60,,,,0.2,0.1
"""  # noqa: E501
PAIRS = """{"v100": {
    "a": {"null": 10.0, "a": [6.0, 6.0], "b": [5.0, 2.0]},
    "b": {"null": 4.0, "a": [2.0, 5.0], "b": [0.0, 0.0]}
}}"""

DEVICE = Device("gpu", "A100", 80 * GB)


def tables(folder):
    (folder / "a100_mig_slices.csv").write_text(SLICES)
    (folder / "gavel_oracle_throughputs.json").write_text(PAIRS)
    return folder


def job(name, workload="", *, compute=1.0, seconds=10.0, memory=1.0, cores=1.0, kind="A100", **changes):
    demand = {kind: Demand(compute, int(memory * GB), cores, seconds)}
    return SimulatedJob(name, demand, workload=workload, **changes)


def tenant(workload="", share=None, **changes):
    return Tenant(job("x", workload, **changes), share)


def cluster(devices=1, *, memory=80, cores=64, kind="A100", oversubscription=1.0):
    each = (Device(f"gpu{i}", kind, memory * GB, oversubscription=oversubscription) for i in range(devices))
    return Cluster((Node("n0", cores, tuple(each)),))


needs_data = pytest.mark.skipif(not REAL.is_dir(), reason=f"{REAL} is not there")
