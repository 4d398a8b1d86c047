"""Start of a job on a node, over Ray and over pipes, beside a local start; `search_vs_peers.py` has a search over Ray.

Jobs that report once and end run one after another on one device, in a warm worker. "local" is the back end alone,
"pipes" an agent process without Ray, "ray" an agent that Ray carries, on a cluster of this machine that is up. The back
ends take turns in rounds; medians are shown.

    python benchmarks/nodes.py [--starts 500] [--rounds 3] [--quick]
"""

import argparse
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ray
from ray.cluster_utils import Cluster

from shoal.core.device import Device
from shoal.core.job import Job
from shoal.core.trial import Report
from shoal.run.base import Backend, Ended, Event, JobControl, Reported, WorkerContext
from shoal.run.local import Local
from shoal.run.nodes.ray import Ray
from shoal.testing.backends import scripted, scripted_job

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.pipes import PipeNodes

MORE_MS = 15.0
"""Asked: milliseconds more for a start over Ray than for a local one, at most."""
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
    parser.add_argument("--starts", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="20 starts, one round; checks no figure")
    options = parser.parse_args()
    count, rounds = (20, 1) if options.quick else (options.starts, options.rounds)
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
    more = round(medians["ray"] - medians["local"], 2)
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, Ray {ray.__version__}")
    print(", ".join(f"{name} {median} ms" for name, median in medians.items()) + f" a start; median of {rounds}")
    missed = [f"{more} ms more over Ray, asked at most {MORE_MS}"] if more > MORE_MS and not options.quick else []
    print(json.dumps({"ms_a_start": medians, "ms_more_a_start": more, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
