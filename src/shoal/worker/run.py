"""Runs a job in a worker process; its contract is `shoal.backends.base.Runner`."""

import os
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from pathlib import Path
from typing import Any

import torch
import torch._compile
from torch.optim import Optimizer
from torch.optim.optimizer import _use_grad_for_differentiable

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
from shoal.worker.profile import UNNOTICED, measure
from shoal.worker.signature_builder import SignatureBuilder
from shoal.worker.train import Trainer
from shoal.worker.worker_state import TrialCache, WorkerState

__all__ = ["postpone_compiler", "prepare", "run", "trained_again"]

_MARK = "__dynamo_disable"
"""Attribute in which torch keeps a method that is wrapped by `torch._dynamo.disable`."""

_BREAKS = _use_grad_for_differentiable(lambda optimizer: None).__code__
"""Code of the wrapper that torch's optimizers have around `step`, unless a hook of an earlier optimizer wraps that."""


def run(job: Job, device: Device, worker_context: WorkerContext, control: JobControl) -> Iterator[Event]:
    """Survey, profile or train, as the job's purpose says."""
    control.beat(settled=False)
    with during(Activity.START):
        worker_state, signature_builder = prepare(device, worker_context)
        if worker_state.device.type == "cuda" and job.purpose is not Purpose.SIGNATURE:
            torch.cuda.synchronize(worker_state.device)  # makes the context, a client of MPS if there is one
    control.beat(settled=False)
    match job.purpose:
        case Purpose.SIGNATURE:
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


def trained_again(task: bytes, trial: Trial, epochs: int, device: Device) -> list[Report]:
    """Train one trial from its start, alone, in this process; its checkpoints go to a temporary directory.

    Args:
        task: Task of the study, pickled by cloudpickle.
        trial: Trial without an origin.
        epochs: Number of epochs. There are fewer reports if its loss is not finite before.
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
    place = _place(device)
    torch.set_num_threads(threads(device.cores))
    if place.type == "cuda":
        torch.cuda.set_device(place)
    postpone_compiler()
    return _prepared(worker_context.task, place, worker_context.directory)


def _place(device: Device) -> torch.device:
    """The device in this process: "cuda:0" if it sees only that one (see `shoal.backends.gpu_sharing`)."""
    if device.uuid and os.environ.get("CUDA_VISIBLE_DEVICES") == device.uuid:
        return torch.device("cuda:0")
    return torch.device(device.torch_name)


@lru_cache(maxsize=1)
def _prepared(pickled: bytes, device: torch.device, directory: Path) -> tuple[WorkerState, SignatureBuilder]:
    """State for the jobs of the study in a directory; the next job of that study gets the same objects."""
    try:
        task: Task = original_or_loaded(pickled)
    except (Exception, SystemExit) as error:
        raise UnusableTaskError(f"the task cannot be loaded in a worker: {why_not_loaded(error)}") from error
    sets = DataSets(task, device)
    return WorkerState(task, sets, TrialCache(), device, directory), SignatureBuilder(task, sets)


def postpone_compiler() -> None:
    """Let optimizers work without an import of `torch._dynamo`, which takes as long as the import of torch.

    Torch imports it at the first call of an optimizer's method only to exclude the method from tracing, and in `step`
    to break the graph. Both are needless until something else imports it; from then on torch's own methods run.
    """
    for method in vars(Optimizer).values():
        if getattr(method, "__globals__", None) is vars(torch._compile) and not hasattr(method.__wrapped__, _MARK):
            setattr(method.__wrapped__, _MARK, _undecorated(method))
    for sort in vars(torch.optim).values():
        if isinstance(sort, type) and issubclass(sort, Optimizer) and getattr(sort.step, "__code__", None) is _BREAKS:
            sort.step = _unbroken(sort.step)  # type: ignore[method-assign]


def _undecorated(method: Callable[..., Any]) -> Callable[..., Any]:
    inner = method.__wrapped__  # type: ignore[attr-defined]

    def run(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:
            return inner(*args, **kwargs)
        vars(inner).pop(_MARK, None)  # another thread may have done so
        return method(*args, **kwargs)

    return run


def _unbroken(step: Callable[..., Any]) -> Callable[..., Any]:
    inner = step.__wrapped__  # type: ignore[attr-defined]

    @wraps(step)
    def run(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" in sys.modules:
            return step(optimizer, *args, **kwargs)
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            return inner(optimizer, *args, **kwargs)

    return run
