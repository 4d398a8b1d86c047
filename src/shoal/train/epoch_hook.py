"""Calls of `Task.end_epoch`, for each trial of an array with its own model."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import FusionError
from shoal.core.trial import derive_seed
from shoal.fuse.frozen import is_shared
from shoal.fuse.generators import seed_all
from shoal.fuse.rows import storage_address
from shoal.task import Task, call
from shoal.train.kept_gradients import enter_array
from shoal.train.outside import OutsideState
from shoal.train.stepper import StepRefusedError
from shoal.train.trial_runtime import TrialRuntime

__all__ = ["call_end_epoch"]


def call_end_epoch(task: Task, runtimes: Sequence[TrialRuntime], fused: bool, outside: OutsideState) -> bool:
    """Call `Task.end_epoch` for the trials that have not failed; return whether an array of them must be made anew.

    Tensors that a call has put in the place of buffers, or given to parameters as `.data`, are copied into the memory
    of these where that is the memory of an array. An array sees no other change of a model's attributes.

    Args:
        fused: Whether the trials are an array.
        outside: What trials keep outside of models; in plain PyTorch each has its own.

    Raises:
        StepRefusedError: a call has changed a frozen parameter that trials share, which is as before; or it has changed
            which tensors of a model of an array share memory, or the gradients of some members alone.
    """
    if type(task).end_epoch is Task.end_epoch:
        return False
    changed, array = False, runtimes[0].gradients.array
    for runtime in runtimes:
        runtime.gradients.leave()
        if runtime.failure:
            continue
        before = _attributes(runtime) if fused else None
        own = _in_place(runtime.model) if fused else outside.of(runtime.trial.number, runtime.model, "end_epoch")
        with _shared_unchanged(runtime.model), own:
            seed_all(derive_seed(runtime.trial.seed, "end_epoch", runtime.epoch), runtime.device)
            call(task, "end_epoch", runtime.model, config=runtime.trial.config)
        changed = changed or (fused and _attributes(runtime) != before)
    if array is not None:
        try:
            enter_array(array[0], [runtime.gradients for runtime in runtimes])
        except FusionError as error:
            raise StepRefusedError(str(error)) from error
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
    memories = [memory for *_, memory in held]
    values = [container.get(name) for container, name, _, _ in held]
    before, after = _first_in_memory(memories), _first_in_memory(values)
    if before != after:
        one = next(number for number, pair in enumerate(zip(before, after, strict=True)) if pair[0] != pair[1])
        names = {held[number][1] for number in (one, before[one], after[one])}
        raise StepRefusedError(
            f"`end_epoch` changes which of the model's tensors share memory ({', '.join(sorted(names))}), and of an "
            "array each is on its own; assign a copy (`.clone()`) if they are not to change together"
        )
    own = set(map(_address, memories))
    replaced = [
        # copied now, as what the first copies write may be the values of others
        (entry, value.detach().clone() if _address(value) in own else value.detach())
        for entry, value in zip(held, values, strict=True)
        if value is not None and _is_replaced(*entry[2:], value)
    ]
    for (container, name, tensor, memory), value in replaced:
        memory.copy_(value)
        tensor.data = memory
        container[name] = tensor


def _is_replaced(tensor: Tensor, memory: Tensor, value: Tensor) -> bool:
    if isinstance(value, nn.Parameter) and value is not tensor:
        return False
    return _fits(value, memory) and value.data_ptr() != memory.data_ptr()


def _first_in_memory(values: Iterable[Tensor | None]) -> list[int]:
    """The number of the first value in the same memory, for each value."""
    found: dict[int, int] = {}
    return [found.setdefault(_address(value) or -1 - number, number) for number, value in enumerate(values)]


def _address(value: Tensor | None) -> int:
    return 0 if value is None else storage_address(value)


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
