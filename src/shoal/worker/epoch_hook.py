"""Calls of `Task.end_epoch`, for each trial of an array with its own model."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.trial import derive_seed
from shoal.fuse.frozen import is_shared
from shoal.fuse.generators import seed_all
from shoal.task import Task, call
from shoal.worker.stepper import StepRefusedError
from shoal.worker.trial_runtime import TrialRuntime

__all__ = ["call_end_epoch"]


def call_end_epoch(task: Task, runtimes: Sequence[TrialRuntime]) -> bool:
    """Call `Task.end_epoch` for the trials that have not failed; return whether an array of them must be made anew.

    Tensors that a call has put in the place of buffers, or given to parameters as `.data`, are copied into the memory
    of these, which is that of the array. An array sees no other change of a model's attributes.

    Raises:
        StepRefusedError: a call has changed a frozen parameter that trials share; it is as before.
    """
    if type(task).end_epoch is Task.end_epoch:
        return False
    changed = False
    for runtime in runtimes:
        if runtime.failure:
            continue
        before = _attributes(runtime)
        seed_all(derive_seed(runtime.trial.seed, "end_epoch", runtime.epoch), runtime.device)
        with _shared_unchanged(runtime.model), _in_place(runtime.model):
            call(task, "end_epoch", runtime.model, config=runtime.trial.config)
        changed = changed or _attributes(runtime) != before
    return changed


def _attributes(runtime: TrialRuntime) -> object:
    return runtime.carried and runtime.carried.attributes()


@contextmanager
def _in_place(model: nn.Module) -> Iterator[None]:
    """Copy values that are assigned to buffers, and to the `.data` of parameters, into the memory of before."""
    held: list[tuple[dict[str, Any], str, Tensor, Tensor]] = [
        (container, name, tensor, tensor.detach())
        for module in model.modules()
        for container in (module._parameters, module._buffers)
        for name, tensor in container.items()
        if tensor is not None and tensor.layout is torch.strided
    ]
    yield
    for container, name, tensor, memory in held:
        new = container.get(name)
        if isinstance(new, nn.Parameter) and new is not tensor:
            continue
        if isinstance(new, Tensor) and _fits(new, memory) and new.data_ptr() != memory.data_ptr():
            memory.copy_(new.detach())
            tensor.data = memory
            container[name] = tensor


@contextmanager
def _shared_unchanged(model: nn.Module) -> Iterator[None]:
    """Undo a change of frozen parameters in memory that other trials use, and refuse it."""
    shared = {each.data_ptr(): (path, each) for path, each in model.named_parameters() if is_shared(each)}
    copies = [(path, each.detach(), each.detach().to("cpu", copy=True)) for path, each in shared.values()]
    yield
    for path, memory, copied in copies:
        if not torch.equal(memory.cpu(), copied):
            memory.copy_(copied)
            raise StepRefusedError(f"`end_epoch` changes {path!r}, which is frozen and in memory that trials share")


def _fits(new: Tensor, memory: Tensor) -> bool:
    return (new.shape, new.dtype, new.device) == (memory.shape, memory.dtype, memory.device)
