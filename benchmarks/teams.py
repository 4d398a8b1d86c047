"""One array on two CPU slots as a team, beside one slot and beside DistributedDataParallel.

Four convolutional networks with batch norm train as one array: in one process, and in two, of which the second is a job
that assists. Beside them, two processes train the same four networks by torch's DistributedDataParallel over gloo, each
network a module of its own, one after another or with one backward pass for all. Its batch norm uses the statistics of
each process, a team's those of the whole batch. Each process has one thread. The ways take turns in blocks of steps;
medians count. Growing is the excess of the step before which the team is formed and compared with its leader; a kill is
the excess of the step whose helper is killed before it.

    python benchmarks/teams.py [--rounds 6] [--quick]
"""

import argparse
import json
import multiprocessing
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cloudpickle
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import shoal
from shoal.core.array import Array, Member
from shoal.core.device import Device
from shoal.core.event import Ended, Event
from shoal.core.job import Job, JobUpdate, Purpose, WorkerContext
from shoal.core.trial import Trial
from shoal.run.local import Local
from shoal.train.array_trainer import ArrayTrainer
from shoal.train.control import JobControl
from shoal.train.data.datasets import DataSets
from shoal.train.run import Trainer
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.worker_state import TrialCache, WorkerState

MEMBERS = 4
ASKED = {"gain": 1.5, "against_ddp": 1.0, "growing_steps": 1.0, "kill_seconds": 1.0}
LONE, TEAM, DDP = "one slot", "team of two", "DDP of two"


class Images(shoal.Task):
    """Networks of different learning rates on random images."""

    def __init__(self, batch: int, steps: int) -> None:
        self.batch = batch
        self.steps = steps

    def data(self, config: Any) -> tuple[Any, Any]:
        rows = self.batch * self.steps
        x, y = torch.randn(self.batch, 3, 32, 32), torch.arange(self.batch) % 10
        return TensorDataset(x.repeat(self.steps, 1, 1, 1), y.repeat(rows // self.batch)), TensorDataset(x[:8], y[:8])

    def model(self, config: Any) -> nn.Module:
        return network()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.SGD(model.parameters(), config["lr"], momentum=0.9)

    def batch_size(self, config: Any) -> int:
        return self.batch

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in ((3, 16), (16, 32), (32, 32)):
        layers += [
            nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def ddp(rank: int, port: int, batch: int, pipe: Any) -> None:
    """Train by DistributedDataParallel, as many steps as are asked for; one process of two."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    models = [DistributedDataParallel(network()) for _ in range(MEMBERS)]
    optimizers = [torch.optim.SGD(each.parameters(), 0.01, momentum=0.9) for each in models]
    x, y = torch.randn(batch // 2, 3, 32, 32), torch.arange(batch // 2) % 10
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        way, steps = asked
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            for optimizer in optimizers:
                optimizer.zero_grad()
            if way == "joint":
                torch.stack([F.cross_entropy(model(x), y) for model in models]).sum().backward()
            for model, optimizer in zip(models, optimizers, strict=True):
                if way != "joint":
                    F.cross_entropy(model(x), y).backward()
                optimizer.step()
            times.append(time.perf_counter() - began)
        pipe.send(times)
    dist.destroy_process_group()


class Rivals:
    """The two processes of DistributedDataParallel; they wait between blocks of steps.

    Args:
        batch: size of a batch.
        port: at which they meet.
        fork: whether they begin as forks of this process, which is to have trained nothing yet, or anew.
    """

    def __init__(self, batch: int, port: int, fork: bool) -> None:
        context: Any = multiprocessing.get_context("fork" if fork else "spawn")
        self._pipes = []
        self._processes = []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=ddp, args=(rank, port, batch, theirs), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)
        for pipe in self._pipes:
            pipe.recv()

    def steps(self, way: str, count: int) -> list[float]:
        """Take steps; return their seconds."""
        for pipe in self._pipes:
            pipe.send((way, count))
        first, _ = [pipe.recv() for pipe in self._pipes]
        return first

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)


class Run:
    """A leader in this process, whose steps are taken alone and by a team in turns."""

    def __init__(self, directory: Path, batch: int, rounds: int, block: int, fork: bool) -> None:
        self._block, self._rounds, self._fork = block, rounds, fork
        self._warm_up = 60  # in which the fastest mode is found, and a lone step measured
        total = self._warm_up + 2 * block * rounds + 3 * block
        self._task = Images(batch, total)
        self._directory = directory
        self._rivals = Rivals(batch, free_port(), fork)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.excess: dict[str, float] = {}
        self._control = JobControl(prompt=True)
        self._taken = 0
        self._known = False  # whether the helper may have been informed, and a lone step has been measured
        sets = DataSets(self._task, torch.device("cpu"))
        self._builder = SignatureBuilder(self._task, sets)
        self._state = WorkerState(self._task, sets, TrialCache(), torch.device("cpu"), directory)

    def run(self) -> None:
        members = tuple(Member(Trial(n, {"lr": 0.01 * (n + 1)}, n, 0), 0, 1) for n in range(MEMBERS))
        array = Array(self._builder.key(members[0].trial), members)
        context = WorkerContext(self._directory, cloudpickle.dumps(self._task), checkpoint_seconds=1e9, fork=self._fork)
        self._backend = Local(context)
        self._backend.start(Job("helper", (array,), Purpose.ASSIST, assists="leader"), Device("cpu:1", "cpu", 2**30))
        trainer = Trainer(Job("leader", (array,)), self._state, self._builder, self._control, context)
        with patch.object(ArrayTrainer, "_take_step", self._observed(ArrayTrainer._take_step)):
            self.events: list[Event] = list(trainer.run())
        self._backend.close()
        self._rivals.close()

    def _observed(self, take_step: Any) -> Any:
        """Time the steps, and choose in which of them helpers take part."""

        def take(lane: ArrayTrainer, *args: Any) -> Tensor:
            number, self._taken = self._taken, self._taken + 1
            if number == self._warm_up // 2:
                self._control.change(JobUpdate(team=frozenset({"helper"})))
            team, since = lane.team, number - self._warm_up
            round_, place = divmod(max(since, 0), 2 * self._block)
            after = round_ >= self._rounds
            if since == 0 and team is not None:
                while not team._side.ready(["helper"]):
                    ended = [event for event in self._backend.poll(0.01) if isinstance(event, Ended)]
                    assert not ended, ended
                    assert not team._refused, team.events
            if team is not None and (self._known if since < 0 else place < self._block and not after):
                lane.team = None  # while warming up, the helper learns what is trained, and joins no step
            killed = since == 2 * self._block * self._rounds + 1
            if killed:
                os.kill(self._helper_pid(), signal.SIGKILL)
            began = time.perf_counter()
            losses: Tensor = take_step(lane, *args)
            seconds = time.perf_counter() - began
            way = LONE if lane.team is None or lane.team.size == 1 else TEAM
            lane.team = team
            self._known = team is not None and team._times[lane.key, MEMBERS].seconds(1) is not None
            if since >= 0 and not after:
                first = way == TEAM and not self.seconds[TEAM] and "growing" not in self.excess
                if first:
                    self.excess["growing"] = seconds
                else:
                    self.seconds[way].append(seconds)
                if place == 2 * self._block - 1:
                    for rival in ("joint", "each"):
                        self.seconds[f"{DDP}, {rival}"] += self._rivals.steps(rival, self._block)
            if killed:
                self.excess["kill"] = seconds
            return losses

        return take

    def _helper_pid(self) -> int:
        (worker,) = self._backend._workers.values()
        while not worker.pid:
            self._backend.poll(0.05)
        return worker.pid


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    return port


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--quick", action="store_true", help="only whether it runs: nothing is asked")
    options = parser.parse_args()
    rounds, block, batch = (2, 3, 8) if options.quick else (options.rounds, 8, options.batch)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), batch, rounds, block, fork=options.quick)
        run.run()
    medians = {way: statistics.median(times) for way, times in run.seconds.items()}
    rival = min(seconds for way, seconds in medians.items() if way.startswith(DDP))
    lone, team = medians[LONE], medians[TEAM]
    result = {
        "gain": lone / team,
        "against_ddp": rival / team,
        "growing_steps": (run.excess["growing"] - team) / lone,
        "kill_seconds": run.excess["kill"] - lone,
    }
    lowest = {"gain", "against_ddp"}
    missed = [name for name, asked in ASKED.items() if (result[name] < asked) == (name in lowest)]
    print(f"{MEMBERS} networks, batches of {batch}, {os.cpu_count()} cores of {platform.machine()},")
    print(f"torch {torch.__version__}; medians of {rounds} rounds of {block} steps\n")
    print(f"{'way':24} {'ms a step':>10}")
    for way, seconds in sorted(medians.items(), key=lambda item: -item[1]):
        print(f"{way:24} {1e3 * seconds:10.1f}")
    print()
    for name, asked in ASKED.items():
        print(f"{name:24} {result[name]:10.2f}   asked: at {'least' if name in lowest else 'most'} {asked}")
    missed = [] if options.quick else missed
    print(json.dumps({**{name: round(value, 3) for name, value in result.items()}, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    import teams  # the processes import the task from this module, not from `__main__`

    sys.exit(teams.main())
