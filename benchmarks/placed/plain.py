"""The way without Shoal: a pool of as many processes as devices, each of which trains one job at a time."""

import math
import multiprocessing
import time
from collections.abc import Sequence
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
from torch.utils.data import TensorDataset

import shoal
from placed.figures import Figures
from shoal.core.device import Cluster

__all__ = ["PLAIN", "plain_processes"]

PLAIN = "plain processes"

Place = tuple[str, int]
"""What torch calls a device, and the threads that a job on it may have."""

_here: dict[str, Any] = {}
"""Of a process of the pool: its device, its task and the task's data."""


def plain_processes(
    task: shoal.Task, configs: Sequence[dict[str, Any]], epochs: int, cluster: Cluster, *, fork: bool
) -> Figures:
    """Run all jobs, in the order of their list; a process loads the data once and keeps it.

    Args:
        task: What to train; its data are tensors, the same for all configurations.
        configs: The configurations of the jobs.
        epochs: Epochs of each job.
        cluster: Its devices have a process each.
        fork: Whether processes begin as forks of this one, or anew.
    """
    began = time.perf_counter()
    context = multiprocessing.get_context("fork" if fork else "spawn")
    places: SimpleQueue[Place] = context.SimpleQueue()
    devices = [device for _, device in cluster]
    for device in devices:
        places.put((device.torch_name, device.cores))
    jobs = [(number, config, epochs) for number, config in enumerate(configs)]
    with context.Pool(len(devices), begin, (task, places)) as pool:
        results = list(pool.imap_unordered(train, jobs, chunksize=1))
    makespan = time.perf_counter() - began
    busy = sum(seconds for seconds, _ in results)
    failed = sum(not math.isfinite(loss) for _, loss in results)
    return Figures(makespan, busy / makespan / len(devices), 0.0, len(results), 1, 0.0, failed)


def begin(task: shoal.Task, places: "SimpleQueue[Place]") -> None:
    name, threads = places.get()
    torch.set_num_threads(threads)
    device = torch.device(name)
    sets = [TensorDataset(*(tensor.to(device) for tensor in part.tensors)) for part in task.data({})]
    _here.update(task=task, device=device, sets=sets)


def train(job: tuple[int, dict[str, Any], int]) -> tuple[float, float]:
    """Train one configuration; return seconds and the last validation loss."""
    began = time.perf_counter()
    number, config, epochs = job
    task: shoal.Task = _here["task"]
    learning, valid = _here["sets"]
    torch.manual_seed(number)
    model = task.model(config).to(_here["device"])
    optimizer = task.optimizer(model, config)
    loss = math.nan
    for _ in range(epochs):
        model.train()
        for part in torch.randperm(len(learning)).split(config["batch_size"]):
            optimizer.zero_grad()
            task.loss(model, [tensor[part] for tensor in learning.tensors]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            losses = []
            for part in torch.arange(len(valid)).split(config["batch_size"]):
                batch = [tensor[part] for tensor in valid.tensors]
                losses.append(task.loss(model, batch))
                task.metrics(model, batch)
            loss = float(torch.stack(losses).mean())
    return time.perf_counter() - began, loss
