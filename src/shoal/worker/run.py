"""A worker's way through a job; `shoal.backends.base.Runner` is its contract."""

import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch

from shoal.cluster.machine import threads
from shoal.core.device import Device
from shoal.core.errors import UnusableTaskError
from shoal.core.event import Event, Profiled, SignaturesFound
from shoal.core.job import Job, Purpose, WorkerContext
from shoal.data.datasets import DataSets
from shoal.pickling import recalled, why_not_loaded
from shoal.task import Task
from shoal.worker.control import JobControl
from shoal.worker.profile import UNNOTICED, measure
from shoal.worker.signature_builder import SignatureBuilder
from shoal.worker.startup import postpone_compiler
from shoal.worker.train import Trainer
from shoal.worker.trial_cache import TrialCache
from shoal.worker.worker_state import WorkerState

__all__ = ["prepare", "run"]


def run(job: Job, device: Device, worker_context: WorkerContext, control: JobControl) -> Iterator[Event]:
    """Do what the job's purpose says."""
    control.beat(settled=False)
    worker_state, signature_builder = prepare(device, worker_context)
    if worker_state.device.type == "cuda" and job.purpose is not Purpose.SURVEY:
        torch.cuda.synchronize(worker_state.device)  # makes the context, and so a client of MPS where that is asked for
    control.beat(settled=False)
    match job.purpose:
        case Purpose.SURVEY:
            yield SignaturesFound(job.id, *signature_builder.survey([member.trial for member in job.members]))
        case Purpose.PROFILE:
            unnoticed = UNNOTICED / len(job.arrays)
            for array in job.arrays:
                if control.stopping():
                    return
                control.beat(settled=False)
                notes: list[str] = []
                task, sets, where = worker_state.task, worker_state.sets, worker_state.device
                profile = measure(task, sets, array, where, device.memory, unnoticed, notes.append)
                yield Profiled(job.id, array.key, profile, "".join(notes))
        case Purpose.TRAIN:
            yield from Trainer(job, worker_state, signature_builder, control, worker_context.checkpoint_seconds).run()


def prepare(device: Device, worker_context: WorkerContext) -> tuple[WorkerState, SignatureBuilder]:
    """Make this process, and the task in it, ready for work on a device."""
    place = _place(device)
    torch.set_num_threads(threads(device.cores))
    if place.type == "cuda":
        torch.cuda.set_device(place)
    postpone_compiler()
    return _prepared(worker_context.task, place, worker_context.directory)


def _place(device: Device) -> torch.device:
    """What torch calls the device here; "cuda:0" where the process sees no other (see `shoal.backends.gpu_sharing`)."""
    if device.uuid and os.environ.get("CUDA_VISIBLE_DEVICES") == device.uuid:
        return torch.device("cuda:0")
    return torch.device(device.torch_name)


@lru_cache(maxsize=1)
def _prepared(pickled: bytes, device: torch.device, directory: Path) -> tuple[WorkerState, SignatureBuilder]:
    """What the next job of the study in a directory can use again in this process."""
    try:
        task: Task = recalled(pickled)
    except (Exception, SystemExit) as error:
        raise UnusableTaskError(f"the task cannot be loaded in a worker: {why_not_loaded(error)}") from error
    sets = DataSets(task, device)
    return WorkerState(task, sets, TrialCache(), device, directory), SignatureBuilder(task, sets)
