"""One array on two CPU slots as a team, beside one slot and beside DistributedDataParallel.

Four convolutional networks with batch norm train as one array: in one process, and in two, of which the second is a job
that assists. Beside them, two processes train the same four networks, one after another, by torch's
DistributedDataParallel over gloo. Its batch norm uses the statistics of each process, a team's those of the whole
batch. Each process has one thread. The ways take turns in blocks of steps; medians count. Growing is the excess of the
step before which the team is formed and compared with its leader.

    python benchmarks/teams.py [--rounds 6] [--quick]
"""

import argparse
import json
import multiprocessing
import socket
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
from search_tasks.search import Supervised
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from shoal.core.array import Array, Member
from shoal.core.device import Device
from shoal.core.event import Ended
from shoal.core.job import Job, JobUpdate, Purpose, WorkerContext
from shoal.core.trial import Trial
from shoal.run.local import Local
from shoal.train.array_trainer import ArrayTrainer
from shoal.train.control import JobControl
from shoal.train.data.datasets import DataSets
from shoal.train.run import Trainer
from shoal.train.signature_builder import SignatureBuilder
from shoal.train.worker_state import TrialCache, WorkerState

MEMBERS, WARM_UP = 4, 60
"""Networks, and steps in which the fastest mode is found and a lone step is measured."""
LEAST = {"gain": 1.5, "against_ddp": 1.0}
MOST = {"growing_steps": 1.0}
LONE, TEAM, DDP = "one slot", "team of two", "DDP of two"


class Images(Supervised):
    """Networks of different learning rates on random images."""

    def __init__(self, batch: int, steps: int) -> None:
        self.batch, self.steps = batch, steps

    def data(self, config: Any) -> tuple[Any, Any]:
        x, y = torch.randn(self.batch, 3, 32, 32), torch.arange(self.batch) % 10
        return TensorDataset(x.repeat(self.steps, 1, 1, 1), y.repeat(self.steps)), TensorDataset(x[:8], y[:8])

    def model(self, config: Any) -> nn.Module:
        return network()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.SGD(model.parameters(), config["lr"], momentum=0.9)

    def batch_size(self, config: Any) -> int:
        return self.batch


def network() -> nn.Module:
    layers: list[nn.Module] = []
    for inside, outside in ((3, 16), (16, 32), (32, 32)):
        convolution = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(outside), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(512, 10))


def ddp(rank: int, port: int, batch: int, pipe: Any) -> None:
    """Train by DistributedDataParallel, as many steps as are asked for; one process of two."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    models = [DistributedDataParallel(network()) for _ in range(MEMBERS)]
    optimizers = [torch.optim.SGD(each.parameters(), 0.01, momentum=0.9) for each in models]
    x, y = torch.randn(batch // 2, 3, 32, 32), torch.arange(batch // 2) % 10
    while steps := pipe.recv():
        times = []
        for _ in range(steps):
            began = time.perf_counter()
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
            times.append(time.perf_counter() - began)
        pipe.send(times)
    dist.destroy_process_group()


def rivals(batch: int) -> list[Any]:
    """Start the two processes of DistributedDataParallel; return a pipe to each."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(2)]
    for rank, (_, theirs) in enumerate(pairs):
        context.Process(target=ddp, args=(rank, port, batch, theirs), daemon=True).start()
    return [ours for ours, _ in pairs]


class Run:
    """A leader in this process, whose steps are taken alone and by a team in turns."""

    def __init__(self, directory: Path, batch: int, rounds: int, block: int) -> None:
        self._directory, self._block, self._rounds = directory, block, rounds
        self._task = Images(batch, WARM_UP + 2 * block * rounds)
        self._rivals = rivals(batch)
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.growing = 0.0
        self._control = JobControl(prompt=True)
        self._taken = 0
        self._known = False  # whether the helper may have been informed, and a lone step has been measured

    def run(self) -> None:
        sets = DataSets(self._task, torch.device("cpu"))
        builder = SignatureBuilder(self._task, sets)
        state = WorkerState(self._task, sets, TrialCache(), torch.device("cpu"), self._directory)
        members = tuple(Member(Trial(n, {"lr": 0.01 * (n + 1)}, n, 0), 0, 1) for n in range(MEMBERS))
        array = Array(builder.key(members[0].trial), members)
        context = WorkerContext(self._directory, cloudpickle.dumps(self._task), checkpoint_seconds=1e9, fork=False)
        self._backend = Local(context)
        self._backend.start(Job("helper", (array,), Purpose.ASSIST, assists="leader"), Device("cpu:1", "cpu", 2**30))
        trainer = Trainer(Job("leader", (array,)), state, builder, self._control, context)
        with patch.object(ArrayTrainer, "_take_step", self._observed(ArrayTrainer._take_step)):
            list(trainer.run())
        self._backend.close()
        self._ask_rivals(0)

    def _ask_rivals(self, steps: int) -> None:
        for pipe in self._rivals:
            pipe.send(steps)

    def _observed(self, take_step: Any) -> Any:
        """Time the steps, and choose in which of them helpers take part."""

        def take(lane: ArrayTrainer, *args: Any) -> Tensor:
            number, self._taken = self._taken, self._taken + 1
            if number == WARM_UP // 2:
                self._control.change(JobUpdate(team=frozenset({"helper"})))
            team, since = lane.team, number - WARM_UP
            place = max(since, 0) % (2 * self._block)
            if since == 0 and team is not None:
                while not team._side.ready(["helper"]):
                    ended = [event for event in self._backend.poll(0.01) if isinstance(event, Ended)]
                    assert not ended, ended
                    assert not team._refused, team.events
            if team is not None and (self._known if since < 0 else place < self._block):
                lane.team = None  # while warming up, the helper learns what is trained, and joins no step
            began = time.perf_counter()
            losses: Tensor = take_step(lane, *args)
            seconds = time.perf_counter() - began
            way = LONE if lane.team is None or lane.team.size == 1 else TEAM
            lane.team = team
            self._known = team is not None and team._times[lane.key, MEMBERS].seconds(1) is not None
            if since >= 0 and way == TEAM and not self.growing:
                self.growing = seconds
            elif since >= 0:
                self.seconds[way].append(seconds)
            if since >= 0 and place == 2 * self._block - 1:
                self._ask_rivals(self._block)
                first, _ = (pipe.recv() for pipe in self._rivals)
                self.seconds[DDP] += first
            return losses

        return take


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--quick", action="store_true", help="only whether it runs: nothing is asked")
    options = parser.parse_args()
    rounds, block, batch = (2, 3, 8) if options.quick else (options.rounds, 8, 128)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), batch, rounds, block)
        run.run()
    medians = {way: statistics.median(times) for way, times in run.seconds.items()}
    print(f"{MEMBERS} networks, batches of {batch}; medians of {rounds} rounds of {block} steps")
    for way, seconds in medians.items():
        print(f"{way:24} {1e3 * seconds:10.1f} ms a step")
    lone, team = medians[LONE], medians[TEAM]
    result = {
        "gain": lone / team,
        "against_ddp": medians[DDP] / team,
        "growing_steps": (run.growing - team) / lone,
    }
    missed = [f"{name}: {result[name]:.2f}, asked {least}" for name, least in LEAST.items() if result[name] < least]
    missed += [f"{name}: {result[name]:.2f}, asked {most}" for name, most in MOST.items() if result[name] > most]
    missed = [] if options.quick else missed
    print(json.dumps({**{name: round(value, 3) for name, value in result.items()}, "missed": missed}))
    return 1 if missed else 0


if __name__ == "__main__":
    import teams  # the processes import the task from this module, not from `__main__`

    sys.exit(teams.main())
