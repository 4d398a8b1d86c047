"""Start of a job on a node, over Ray and over pipes, beside a local start; `search_vs_peers.py` has a search over Ray.

Jobs that report once and end run one after another on one device, in a warm worker. "local" is the back end alone,
"pipes" an agent process without Ray, "ray" an agent that Ray carries, on a cluster of this machine that is up. The back
ends take turns in rounds; medians are shown.

    python benchmarks/nodes.py [--quick]
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ray
from papers.experiment import missed_of
from papers.rivals import EXPERIMENTS, NODES
from ray.cluster_utils import Cluster
from report import machine, report

from shoal.core.device import Device
from shoal.core.job import Job
from shoal.core.trial import Report
from shoal.run.base import Backend, Ended, Event, JobControl, Reported, WorkerContext
from shoal.run.local import Local
from shoal.run.nodes.ray import Ray
from shoal.testing.backends import scripted, scripted_job

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.pipes import PipeNodes

STARTS, ROUNDS = 500, 3
BACKENDS: dict[str, Callable[[WorkerContext], Backend]] = {"local": Local, "pipes": PipeNodes, "ray": Ray}


def reports_once(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    yield Reported(job.id, (Report(0, 1, {"loss": 1.0}),))


def starts(name: str, count: int, folder: Path) -> float:
    """Milliseconds from the start of a job to its end, without the first job."""
    device = Device("cpu:0" if name == "local" else "ash/cpu:0", "cpu/1", 2**30)
    with scripted(BACKENDS[name], folder, reports_once) as backend:
        run(backend, "first", device)
        began = time.perf_counter()
        for number in range(count):
            run(backend, f"job-{number}", device)
        return 1e3 * (time.perf_counter() - began) / count


def run(backend: Backend, job: str, device: Device) -> None:
    backend.start(scripted_job(job), device)
    while not any(isinstance(event, Ended) for event in backend.poll(10.0)):
        pass


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="20 starts, one round; checks no figure")
    quick = parser.parse_args().quick
    count, rounds = (20, 1) if quick else (STARTS, ROUNDS)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    found: dict[str, list[float]] = {name: [] for name in BACKENDS}
    with tempfile.TemporaryDirectory() as place:
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "node_name": "ash"})
        Ray.connect(cluster.address)
        for number in range(rounds):
            for name, times in found.items():
                times.append(starts(name, count, Path(place) / f"{name}-{number}"))
        ray.shutdown()
        cluster.shutdown()
    medians = {name: round(statistics.median(times), 2) for name, times in found.items()}
    figures = {"ms_a_start": medians, "ms_more_a_start": round(medians["ray"] - medians["local"], 2)}
    print(f"{machine('ray')}; " + ", ".join(f"{name} {median} ms a start" for name, median in medians.items()))
    return report(figures, [] if quick else missed_of(EXPERIMENTS, NODES, figures))


if __name__ == "__main__":
    sys.exit(main())
