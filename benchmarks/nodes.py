"""What nodes cost on one machine: jobs started over Ray and over pipes beside local ones, and a search over Ray.

- starts: 500 jobs that report once and end, one after another on one device, in a warm worker. "local" is the back end
  alone, "pipes" an agent process without Ray, "ray" an agent that Ray carries, on a cluster of this machine that is up.
- search: 32 trials of an MLP on the digits, 10 epochs, from the call of `tune` to its return, "local" and "ray". A
  program that searches once is a first search: it is connected to the cluster, which has none of its processes. Later
  searches of a program find the agents of the first one, as local ones find the server of workers.
- tune, with `--tune`: the same search by Ray Tune on the same cluster, which is up, as search_vs_peers.py has it: the
  same models, data and epochs, a plain loop over a DataLoader, a trial a core. "ray_tune" starts a process for each
  trial, as Ray Tune does by itself; "ray_tune_reused" trains the next trial in the process of the last one. A trial
  imports torch only: data and functions are sent to it.

Rounds take turns. Medians of the rounds.

    python benchmarks/nodes.py [--starts 500] [--rounds 3] [--tune] [--quick]
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ray
import search_vs_peers
from ray.cluster_utils import Cluster
from search_vs_peers import EPOCHS, RATES, Digits, ray_tune_search

import shoal
from shoal.core.device import Device
from shoal.core.job import Job
from shoal.core.trial import Report
from shoal.run.base import Backend, Ended, Event, JobControl, Reported, WorkerContext
from shoal.run.local import Local
from shoal.run.nodes.ray import Ray
from shoal.testing.backends import scripted, scripted_job

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from support.pipes import PipeNodes

ASKED = {"ms_more_a_start": 15.0, "seconds_more_a_first_search": 2.0, "seconds_more_a_later_search": 2.0}
"""At most, over Ray beside local."""
ASKED_OF_RAY_TUNE = 15.0
"""At least, the time of "ray_tune" by that of a search over Ray, of a first one and of a later one."""
RAY_TUNE = ("ray_tune", "ray_tune_reused")


def reports_once(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    yield Reported(job.id, (Report(0, 1, {"loss": 1.0}),))


def starts(make: Callable[[WorkerContext], Backend], device: Device, count: int, folder: Path) -> float:
    """Milliseconds from the start of a job to its end, without the first job."""
    with scripted(make, folder, reports_once) as backend:
        run(backend, "first", device)
        began = time.perf_counter()
        for number in range(count):
            run(backend, f"job-{number}", device)
        return 1e3 * (time.perf_counter() - began) / count


def run(backend: Backend, job: str, device: Device) -> None:
    backend.start(scripted_job(job), device)
    while not any(isinstance(event, Ended) for event in backend.poll(10.0)):
        pass


def search(folder: Path, trials: int, backend: str) -> float:
    """Seconds of a search."""
    began = time.perf_counter()
    shoal.tune(
        Digits(),
        {"lr": shoal.grid(RATES[:trials])},
        metric="accuracy",
        mode="max",
        algorithm=shoal.Grid(EPOCHS),
        devices="cpu:2",
        backend=backend,
        directory=folder,
        show_progress=False,
    )
    return time.perf_counter() - began


def ray_tune(trials: int, *, reuse: bool) -> float:
    """Seconds of the search by Ray Tune, whose modules are imported before the clock starts."""
    from ray import cloudpickle, tune  # noqa: F401

    cloudpickle.register_pickle_by_value(search_vs_peers)  # else each trial imports that file, and Shoal with it
    del RATES[trials:]
    began = time.perf_counter()
    ray_tune_search(EPOCHS, reuse=reuse)
    return time.perf_counter() - began


def first_search(folder: Path, trials: int, tool: str, address: str) -> float:
    """Seconds of a search of a new process, by a back end of Shoal or by Ray Tune."""
    arguments = ["--search", str(folder), tool, address, str(trials)]
    run = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(run.stderr)
    return float(run.stdout.splitlines()[-1])


def search_of_a_new_process(folder: str, tool: str, address: str, trials: str) -> None:
    if tool != "local":
        Ray.connect(address)
    if tool in RAY_TUNE:
        print(ray_tune(int(trials), reuse=tool != "ray_tune"))
    else:
        print(search(Path(folder), int(trials), tool))


def compared(which: str, seconds: dict[str, list[float]]) -> dict[str, object]:
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    return {
        f"seconds_a_{which}_search": {name: round(median, 2) for name, median in medians.items()},
        f"seconds_more_a_{which}_search": round(medians["ray"] - medians["local"], 2),
    }


def as_fast(first: dict[str, list[float]], later: dict[str, list[float]]) -> dict[str, object]:
    """How many times as fast as Ray Tune a search over Ray is, the first and the later ones of a program."""
    medians = {name: statistics.median(found) for name, found in first.items()}
    over_ray = {"first": medians["ray"], "later": statistics.median(later["ray"])}
    return {
        f"times_as_fast_as_{name}": {which: round(medians[name] / seconds, 1) for which, seconds in over_ray.items()}
        for name in RAY_TUNE
    }


def shortfalls(figures: dict[str, Any]) -> list[str]:
    """Names of the figures that miss what is asked; without `--tune` Ray Tune is not among them."""
    times = figures.get("times_as_fast_as_ray_tune", {})
    slow = [f"times_as_fast_as_ray_tune, {which}" for which, found in times.items() if found < ASKED_OF_RAY_TUNE]
    return [name for name, most in ASKED.items() if figures[name] > most] + slow


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--starts", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tune", action="store_true", help="the search by Ray Tune, too: two minutes more a round")
    parser.add_argument("--quick", action="store_true", help="20 starts, one round, 4 trials; checks no figure")
    parser.add_argument("--search", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.search:
        search_of_a_new_process(*options.search)
        return 0
    count, rounds, trials = (20, 1, 4) if options.quick else (options.starts, options.rounds, 32)
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    made: dict[str, tuple[Callable[[WorkerContext], Backend], str]] = {
        "local": (Local, "cpu:0"),
        "pipes": (PipeNodes, "ash/cpu:0"),
        "ray": (Ray, "ash/cpu:0"),
    }
    milliseconds: dict[str, list[float]] = {name: [] for name in made}
    tools = ["local", "ray", *(RAY_TUNE if options.tune else ())]
    first: dict[str, list[float]] = {name: [] for name in tools}
    seconds: dict[str, list[float]] = {"local": [], "ray": []}
    with tempfile.TemporaryDirectory() as place:
        os.environ["SHOAL_CACHE"] = str(Path(place) / "cache")
        cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "node_name": "ash"})
        Ray.connect(cluster.address)
        for number in range(rounds):
            for name, (make, device) in made.items():
                folder = Path(place) / f"{name}-{number}"
                milliseconds[name].append(starts(make, Device(device, "cpu/1", 2**30), count, folder))
            for name, found in first.items():
                found.append(first_search(Path(place) / f"first-{name}-{number}", trials, name, cluster.address))
            for name, found in seconds.items():
                found.append(search(Path(place) / f"search-{name}-{number}", trials, name))
        ray.shutdown()
        cluster.shutdown()
    figures: dict[str, Any] = {
        "starts": count,
        "ms_a_start": {name: round(statistics.median(found), 2) for name, found in milliseconds.items()},
        "ms_more_a_start": round(statistics.median(milliseconds["ray"]) - statistics.median(milliseconds["local"]), 2),
        "trials": trials,
        **compared("first", first),
        **compared("later", seconds),
        **(as_fast(first, seconds) if options.tune else {}),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "ray": ray.__version__,
    }
    print(json.dumps({"milliseconds": milliseconds, "first": first, "later": seconds}))
    missed = [] if options.quick else shortfalls(figures)
    print(json.dumps({**figures, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
