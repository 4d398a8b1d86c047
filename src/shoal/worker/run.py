"""Runs a job in a worker process; its contract is `shoal.backends.base.Runner`."""

import os
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import torch

from shoal.cluster.machine import threads
from shoal.cluster.temporary import TemporaryFolder
from shoal.core.activity import Activity
from shoal.core.array import Array, FusionKey, Member
from shoal.core.device import Device
from shoal.core.errors import UnusableTaskError
from shoal.core.event import Event, Profiled, Reported, SignaturesFound
from shoal.core.job import Job, Purpose, WorkerContext
from shoal.core.trial import Report, Trial
from shoal.cost.activity_clock import during
from shoal.data.datasets import DataSets
from shoal.pickling import original_or_loaded, why_not_loaded
from shoal.task import Task
from shoal.worker.control import JobControl
from shoal.worker.postponed_compiler import postpone_compiler
from shoal.worker.profile import FREE_SECONDS, measure
from shoal.worker.signature_builder import SignatureBuilder
from shoal.worker.team.helper import assist
from shoal.worker.train import Trainer
from shoal.worker.worker_state import TrialCache, WorkerState

__all__ = ["prepare", "retrain", "run"]


def run(job: Job, device: Device, worker_context: WorkerContext, control: JobControl) -> Iterator[Event]:
    """Find signatures, profile, train or assist another job, depending on the job's purpose."""
    control.beat(settled=False)
    with during(Activity.START):
        worker_state, signature_builder = prepare(device, worker_context)
        if worker_state.device.type == "cuda" and job.purpose is not Purpose.SIGNATURE:
            torch.cuda.synchronize(worker_state.device)  # creates the CUDA context, which is an MPS client if MPS runs
    control.beat(settled=False)
    match job.purpose:
        case Purpose.SIGNATURE:
            yield SignaturesFound(job.id, *signature_builder.find_keys([member.trial for member in job.members]))
        case Purpose.PROFILE:
            free_seconds = FREE_SECONDS / len(job.arrays)
            for array in job.arrays:
                if control.stopping():
                    return
                control.beat(settled=False)
                notes: list[str] = []
                task, sets, torch_device = worker_state.task, worker_state.sets, worker_state.device
                profile = measure(task, sets, array, torch_device, device.memory, free_seconds, notes.append)
                yield Profiled(job.id, array.key, profile, "".join(notes), _compute_limit())
        case Purpose.TRAIN:
            yield from Trainer(job, worker_state, signature_builder, control, worker_context).run()
        case Purpose.ASSIST:
            assist(job, worker_state, control, worker_context.host)


def retrain(task: bytes, trial: Trial, epochs: int, device: Device) -> list[Report]:
    """Train one trial from its start, alone, in this process, with checkpoints in a temporary directory.

    Args:
        task: Task of the study, pickled by cloudpickle.
        trial: Trial without an origin.
        epochs: Number of epochs. There are fewer reports if the loss becomes infinite or NaN before.
        device: Device to train on.

    Returns:
        The reports of the trial.

    Raises:
        Exception: Whatever the user's methods raise.
    """
    array = Array(FusionKey(f"trial {trial.number}", "", 1, trial.data_seed), (Member(trial, 0, epochs),))
    with TemporaryFolder() as folder:
        events = run(Job("rerun", (array,)), device, WorkerContext(folder.path, task), JobControl(prompt=True))
        return [report for event in events if isinstance(event, Reported) for report in event.reports]


def prepare(device: Device, worker_context: WorkerContext) -> tuple[WorkerState, SignatureBuilder]:
    """Prepare this process and the task for a device."""
    torch_device = _torch_device(device)
    torch.set_num_threads(threads(device.cores))
    if torch_device.type == "cuda":
        torch.cuda.set_device(torch_device)
    postpone_compiler()
    return _cached_state(worker_context.task, torch_device, worker_context.directory)


def _torch_device(device: Device) -> torch.device:
    """Return the device as torch names it here: "cuda:0" if no other is visible (see `shoal.backends.gpu_sharing`)."""
    if device.uuid and os.environ.get("CUDA_VISIBLE_DEVICES") == device.uuid:
        return torch.device("cuda:0")
    return torch.device(device.torch_name)


def _compute_limit() -> float | None:
    """Return the part of the GPU that MPS lets this process use; None: all of it, or no MPS."""
    percentage = float(os.environ.get("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", 100))
    return percentage / 100 if percentage < 100 else None


@lru_cache(maxsize=1)
def _cached_state(pickled: bytes, device: torch.device, directory: Path) -> tuple[WorkerState, SignatureBuilder]:
    """Return the worker state and signature builder of a study; its next job in this process gets the same ones."""
    try:
        task: Task = original_or_loaded(pickled)
    except (Exception, SystemExit) as error:
        raise UnusableTaskError(f"the task cannot be loaded in a worker: {why_not_loaded(error)}") from error
    sets = DataSets(task, device)
    return WorkerState(task, sets, TrialCache(), device, directory), SignatureBuilder(task, sets)
