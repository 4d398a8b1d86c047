"""What one writes without Shoal: a pool of as many processes as devices, each of which trains one job at a time."""

import math
import multiprocessing
import time
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
from torch.utils.data import TensorDataset

from placed.figures import Figures
from placed.jobs import Pictures, configs
from shoal.core.device import Cluster

__all__ = ["plain_processes"]

Place = tuple[str, int]
"""What torch calls a device, and the threads that a job on it may have."""

_here: dict[str, Any] = {}
"""Of a process of the pool: its device, its task and the task's data."""


def plain_processes(task: Pictures, cluster: Cluster, *, fork: bool) -> Figures:
    """All jobs, in the order of their list; a process loads the data once and keeps it.

    Args:
        task: what to train.
        cluster: a process for each of its devices.
        fork: whether processes begin as forks of this one, or anew.
    """
    began = time.perf_counter()
    context = multiprocessing.get_context("fork" if fork else "spawn")
    places: SimpleQueue[Place] = context.SimpleQueue()
    for _, device in cluster:
        places.put((device.torch_name, device.cores))
    jobs = list(enumerate(configs(task.sizes)))
    with context.Pool(len(list(cluster)), begin, (task, places)) as pool:
        results = list(pool.imap_unordered(train, jobs, chunksize=1))
    makespan = time.perf_counter() - began
    busy = sum(seconds for seconds, _ in results)
    failed = sum(not math.isfinite(loss) for _, loss in results)
    return Figures(makespan, busy / makespan / len(list(cluster)), busy, 0.0, 0.0, len(results), failed)


def begin(task: Pictures, places: "SimpleQueue[Place]") -> None:
    name, threads = places.get()
    torch.set_num_threads(threads)
    device = torch.device(name)
    sets = [TensorDataset(*(tensor.to(device) for tensor in part.tensors)) for part in task.data({})]
    _here.update(task=task, device=device, sets=sets)


def train(job: tuple[int, dict[str, Any]]) -> tuple[float, float]:
    """One configuration; returns seconds and the last validation loss."""
    began = time.perf_counter()
    number, config = job
    task: Pictures = _here["task"]
    learning, valid = _here["sets"]
    torch.manual_seed(number)
    model = task.model(config).to(_here["device"])
    optimizer = task.optimizer(model, config)
    loss = math.nan
    for _ in range(task.sizes.epochs):
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
