"""One array on two CPU slots as a team, beside one slot and beside DistributedDataParallel.

Four convolutional networks with batch norm train as one array: in one process, and in two, of which the second is a job
that assists. Beside them, two processes train the same four networks, one after another, by torch's
DistributedDataParallel over gloo. Its batch norm uses the statistics of each process, a team's those of the whole
batch. Each process has one thread. The ways take turns in blocks of steps; medians count. Growing is the excess of the
step before which the team is formed and compared with its leader.

    python benchmarks/teams.py [--quick]
"""

import argparse
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import cloudpickle
import torch
import torch.distributed as dist
import torch.nn.functional as F
from papers.experiment import missed_of
from papers.fluid import EXPERIMENTS, TEAMS
from report import report
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


def ddp(rank: int, port: int, batch: int) -> Iterator[float]:
    """Train by DistributedDataParallel as one process of two; yield the seconds of each step."""
    store = dist.TCPStore("127.0.0.1", port, 2, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    models = [DistributedDataParallel(network()) for _ in range(MEMBERS)]
    optimizers = [torch.optim.SGD(each.parameters(), 0.01, momentum=0.9) for each in models]
    x, y = torch.randn(batch // 2, 3, 32, 32), torch.arange(batch // 2) % 10
    while True:
        began = time.perf_counter()
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        yield time.perf_counter() - began


def second_of_ddp(port: int, batch: int, steps: int) -> None:
    """Take part in so many steps, each of which waits for the first process."""
    torch.set_num_threads(1)
    for _ in islice(ddp(1, port, batch), steps):
        pass


def measure(directory: Path, batch: int, rounds: int, block: int) -> tuple[dict[str, list[float]], float]:
    """Seconds of the steps by way, and of the step in which the team is formed.

    A leader in this process takes blocks of steps alone and in a team, and after them a block of
    DistributedDataParallel's is taken.
    """
    task = Images(batch, WARM_UP + 2 * block * rounds)
    sets = DataSets(task, torch.device("cpu"))
    builder = SignatureBuilder(task, sets)
    state = WorkerState(task, sets, TrialCache(), torch.device("cpu"), directory)
    members = tuple(Member(Trial(n, {"lr": 0.01 * (n + 1)}, n, 0), 0, 1) for n in range(MEMBERS))
    array = Array(builder.key(members[0].trial), members)
    context = WorkerContext(directory, cloudpickle.dumps(task), checkpoint_seconds=1e9, fork=False)
    backend, control = Local(context), JobControl(prompt=True)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    other = multiprocessing.get_context("spawn").Process(
        target=second_of_ddp, args=(port, batch, rounds * block), daemon=True
    )
    other.start()
    rival, take_step = ddp(0, port, batch), ArrayTrainer._take_step
    seconds: dict[str, list[float]] = defaultdict(list)
    growing, taken = 0.0, 0
    known = False  # whether the helper may have been informed, and a lone step has been measured

    def take(lane: ArrayTrainer, *args: Any) -> Tensor:
        """Time a step, in which helpers take part or not."""
        nonlocal growing, taken, known
        since, taken = taken - WARM_UP, taken + 1
        if since == -WARM_UP // 2:
            control.change(JobUpdate(team=frozenset({"helper"})))
        team, place = lane.team, since % (2 * block)
        if since == 0 and team is not None:
            while not team._side.ready(["helper"]):
                ended = [event for event in backend.poll(0.01) if isinstance(event, Ended)]
                assert not ended, ended
                assert not team._refused, team.events
        if team is not None and (known if since < 0 else place < block):
            lane.team = None  # while warming up, the helper learns what is trained, and joins no step
        began = time.perf_counter()
        losses: Tensor = take_step(lane, *args)
        took = time.perf_counter() - began
        way = LONE if lane.team is None or lane.team.size == 1 else TEAM
        lane.team = team
        known = team is not None and team._times[lane.key, MEMBERS].seconds(1) is not None
        if since >= 0 and way == TEAM and not growing:
            growing = took
        elif since >= 0:
            seconds[way].append(took)
        if since >= 0 and place == 2 * block - 1:
            seconds[DDP] += islice(rival, block)
        return losses

    backend.start(Job("helper", (array,), Purpose.ASSIST, assists="leader"), Device("cpu:1", "cpu", 2**30))
    with patch.object(ArrayTrainer, "_take_step", take):
        list(Trainer(Job("leader", (array,)), state, builder, control, context).run())
    backend.close()
    other.join()
    return seconds, growing


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="only whether it runs: nothing is asked")
    quick = parser.parse_args().quick
    rounds, block, batch = (2, 3, 8) if quick else (6, 8, 128)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        seconds, growing = measure(Path(folder), batch, rounds, block)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    print(f"{MEMBERS} networks, batches of {batch}; medians of {rounds} rounds of {block} steps")
    for way, median in medians.items():
        print(f"{way:24} {1e3 * median:10.1f} ms a step")
    lone, team = medians[LONE], medians[TEAM]
    figures = {
        "gain": round(lone / team, 3),
        "against_ddp": round(medians[DDP] / team, 3),
        "growing_steps": round((growing - team) / lone, 3),
    }
    return report(figures, [] if quick else missed_of(EXPERIMENTS, TEAMS, figures))


if __name__ == "__main__":
    import teams  # the processes import the task from this module, not from `__main__`

    sys.exit(teams.main())
