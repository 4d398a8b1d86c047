"""A simulated study of a million trials on ten thousand devices, through the state machine of every live study.

Random search over eight structures, whose models differ in memory and in what an epoch costs, on GPUs of two kinds, in
nodes of eight. Models are looked at, measured, fused into arrays, packed, placed and trained as in a live study; only
the back end and its clock are virtual, and there is no journal. What jobs say in a few seconds of the virtual clock is
heard in one turn. What counts is CPU time, all of it of one thread, as other programs on the machine have no part in
it; the wall time is told, too.

    python benchmarks/simulated_scale.py [--trials 1000000] [--devices 10000] [--quick]
"""

import argparse
import gc
import json
import os
import platform
import resource
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from shoal.algorithms.random import Random
from shoal.core.array import FusionKey
from shoal.core.command import KillJob, StartJob, Step, StopJob, UpdateJob
from shoal.core.demand import Profile
from shoal.core.device import Cluster, Device, Node
from shoal.core.job import Purpose, WorkerContext
from shoal.core.space import Space, choice, uniform
from shoal.core.trial import Report, Trial, TrialState, derive_seed
from shoal.host.fleet import Fleet
from shoal.plan.array_packer import ArrayPacker
from shoal.plan.cost.history import History
from shoal.plan.schedule.registry import make_policy
from shoal.run.virtual import Virtual, Workload
from shoal.spec import StudySpec
from shoal.study.core import StudyCore
from shoal.study.devices import DeviceTracker
from shoal.study.event import Due
from shoal.study.hangs import HangDetector
from shoal.study.state import CoreConfig

ASKED = {"seconds": 600.0, "gib": 2.0}
"""At most."""

TICK = 10.0
"""Seconds of the virtual clock whose events are heard in one turn."""

EPOCHS = 3
WIDTHS = [64, 96, 128, 192, 256, 384, 512, 768]
KINDS = {"gpu": 1.0, "fast gpu": 0.6}
"""Kinds of devices, and seconds on them over those on the first."""

_GB = 10**9


@dataclass(frozen=True)
class Work(Workload):
    """Trials of one width are one structure; the wider, the longer an epoch takes, from half a minute to some."""

    keys: dict[int, FusionKey]
    profiles: dict[tuple[FusionKey, str], Profile]

    def key(self, trial: Trial) -> FusionKey:
        """That of its width."""
        return self.keys[trial.config["width"]]

    def profile(self, key: FusionKey, kind: str) -> Profile:
        """As it was made up."""
        return self.profiles[key, kind]

    def report(self, trial: Trial, epoch: int) -> Report:
        """A loss that falls, with noise."""
        noise = derive_seed("noise", trial.number, epoch) / 2**63
        return Report(trial.number, epoch, {"loss": trial.config["x"] + noise / epoch})

    def error(self, trial: Trial, epoch: int) -> str:
        """Nothing is wrong with any."""
        return ""


def work() -> Work:
    """Sixteen models at once take four times as long as one, and are the most efficient array."""
    keys = {width: FusionKey(f"net {width}", "data", 32) for width in WIDTHS}
    profiles = {
        (key, kind): Profile(
            {size: slow * width / 3000 * factor for size, factor in ((1, 1.0), (16, 4.0), (32, 8.8))},
            epoch_steps=300,
            validation_steps=30,
            base_memory=2 * _GB,
            member_memory=width * _GB // 256,
            compute=0.9 if width > 128 else 0.45,
            cores=1.0,
        )
        for width, key in keys.items()
        for kind, slow in KINDS.items()
    }
    return Work(keys, profiles)


def cluster_of(devices: int) -> Cluster:
    """Nodes of eight devices of one kind."""
    names = [(f"gpu:{number}", number // 8) for number in range(devices)]
    nodes: dict[int, list[Device]] = {}
    for name, node in names:
        nodes.setdefault(node, []).append(Device(name, list(KINDS)[node % len(KINDS)], 80 * _GB, cores=8))
    return Cluster(tuple(Node(f"node-{number}", 64, tuple(held)) for number, held in nodes.items()))


class Simulation:
    """The loop of a study without a journal: take events, step, carry out."""

    def __init__(self, trials: int, devices: int, folder: Path) -> None:
        algorithm = Random(trials, EPOCHS)
        space = Space({"x": uniform(0.0, 1.0), "width": choice(WIDTHS)})
        algorithm.bind(space, metric="loss", mode="min", seed=0, data_seed=0)
        self.backend = Virtual(WorkerContext(folder, b"", checkpoint_seconds=600.0), work(), tick=TICK)
        self.core = StudyCore(
            CoreConfig(
                directory=folder,
                spec=StudySpec(metric="loss", mode="min"),
                study={},
                algorithm=algorithm,
                policy=make_policy("auto"),
                history=History(folder / "history.sqlite"),
                devices=DeviceTracker(Fleet(cluster_of(devices)), lambda names: Cluster(()), HangDetector(), folder),
                packer=ArrayPacker(),
            )
        )
        self.turns = 0
        self.jobs = Counter[Purpose]()
        self.busy = 0.0  # jobs on devices, summed over turns
        self.took = Counter[str]()

    def run(self) -> None:
        """Go on until the algorithm has finished."""
        state = self.core.state
        while not state.finished:
            for due in Due:
                began = time.perf_counter()
                self._do(self.core.step(due, self.backend.now))
                self.took[due.value] += time.perf_counter() - began
            began = time.perf_counter()
            said = self.backend.poll(60.0)
            self.took["back end"] += time.perf_counter() - began
            began = time.perf_counter()
            for event in said:
                self._do(self.core.step(event, self.backend.now))
            self.took["events"] += time.perf_counter() - began
            self.turns += 1
            if self.turns == 1:
                gc.freeze()  # the trials are there to the end, and need not be looked at by the collector
                gc.set_threshold(100_000, 20, 100)
            if self.turns % 20 == 0:
                self._tell()

    def _do(self, step: Step) -> None:
        for command in step.commands:
            match command:
                case StartJob():
                    self.jobs[command.job.purpose] += 1
                    self.backend.start(command.job, command.device)
                case UpdateJob():
                    self.backend.change(command.job, command.update)
                case StopJob():
                    self.backend.stop(command.job)
                case KillJob():
                    self.backend.kill(command.job)

    def _tell(self) -> None:
        took = ", ".join(f"{name} {seconds:.0f}" for name, seconds in self.took.items())
        print(f"turn {self.turns}, {self.backend.now:.0f} s of the virtual clock, {len(self.core.state.running)} jobs "
              f"run; seconds: {took}; {peak():.2f} GiB", flush=True)  # fmt: skip


def peak() -> float:
    """Of the process's resident set, in GiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=1_000_000)
    parser.add_argument("--devices", type=int, default=10_000)
    parser.add_argument("--quick", action="store_true", help="1,000 trials on 50 devices; checks no figure")
    options = parser.parse_args()
    trials, devices = (1_000, 50) if options.quick else (options.trials, options.devices)
    began, cpu = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        simulation = Simulation(trials, devices, Path(folder))
        simulation.run()
    wall, seconds = time.perf_counter() - began, time.process_time() - cpu
    complete = sum(standing.state is TrialState.COMPLETE for standing in simulation.core.state.trials)
    jobs = ", ".join(f"{count} {purpose}" for purpose, count in simulation.jobs.items())
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}; "
          f"load {os.getloadavg()[0]:.1f}, wall time {wall:.0f} s; jobs: {jobs}; "
          f"{simulation.backend.now:.0f} s of the virtual clock")  # fmt: skip
    simulation._tell()
    figures = {"seconds": round(seconds, 1), "gib": round(peak(), 3)}
    missed = [] if options.quick else [
        f"{name}: {figures[name]}, asked at most {most}" for name, most in ASKED.items() if figures[name] > most
    ]  # fmt: skip
    if complete != trials:
        missed.append(f"{complete} of {trials} trials are complete")
    print(json.dumps({**figures, "trials": trials, "devices": devices, "turns": simulation.turns, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
