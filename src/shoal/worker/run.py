"""A worker's way through a job; `shoal.backend.base.Runner` is its contract."""

from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import cloudpickle
import torch

from shoal.cluster.device import Device
from shoal.errors import TaskError
from shoal.planner.event import Event, Profiled, Surveyed
from shoal.planner.job import Job, Purpose, Workplace
from shoal.planner.orders import Orders
from shoal.task import Task
from shoal.worker.data import DataSets
from shoal.worker.describe import Describer
from shoal.worker.paused import Paused
from shoal.worker.profile import measure
from shoal.worker.startup import postpone_compiler
from shoal.worker.train import Trainer

__all__ = ["run"]


def run(job: Job, device: Device, workplace: Workplace, orders: Orders) -> Iterator[Event]:
    """Do what the job's purpose says."""
    place = torch.device(device.name if device.is_cuda else "cpu")
    torch.set_num_threads(device.cores)
    if place.type == "cuda":
        torch.cuda.set_device(place)
    postpone_compiler()
    task, sets, describer, paused = _prepared(workplace.task, place, workplace.directory)
    match job.purpose:
        case Purpose.SURVEY:
            yield Surveyed(job.id, *describer.survey([member.trial for member in job.members]))
        case Purpose.PROFILE:
            yield Profiled(job.id, measure(task, sets, job.arrays[0], place, device.memory))
        case Purpose.TRAIN:
            trainer = Trainer(job.id, task, sets, describer, paused, place, workplace, orders)
            for array in job.arrays:
                yield from trainer.run(array)


@lru_cache(maxsize=1)
def _prepared(pickled: bytes, device: torch.device, directory: Path) -> tuple[Task, DataSets, Describer, Paused]:
    """What the next job of the study in a directory can use again in this process.

    The task, its data sets, what is known of its models, and trials that have paused.
    """
    try:
        task: Task = cloudpickle.loads(pickled)
    except (ImportError, AttributeError) as error:
        raise TaskError(
            f"the task cannot be loaded in a worker: {error}; define it in a module on sys.path or in the script itself"
        ) from error
    sets = DataSets(task, device)
    return task, sets, Describer(task, sets), Paused()
