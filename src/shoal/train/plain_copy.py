"""A copy of a trial that trains beside it in plain PyTorch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from shoal.core.errors import FusionError
from shoal.fuse.aliasing import lazy_clone
from shoal.fuse.array import ModelArray
from shoal.fuse.frozen import is_shared, large_frozen, record_shared
from shoal.fuse.model_copy import copy_training
from shoal.fuse.rows import bytes_of
from shoal.fuse.stacked import Stacked
from shoal.task import Task, size_of
from shoal.train.comparison import TensorKey, is_same_memory, tensors_of
from shoal.train.kept_gradients import KeptGradients
from shoal.train.metrics import ValidationMetrics
from shoal.train.stepper import PlainStepper
from shoal.train.trial_runtime import TrialRuntime, optimizers_in

__all__ = ["PlainCopy", "copied_bytes", "copy_trial"]


def copied_bytes(runtime: TrialRuntime) -> int:
    """Return the bytes of a copy of a trial, with gradients and optimizer state as large as its parameters."""
    parameters = list(runtime.model.parameters())
    trained = bytes_of(each for each in parameters if each.requires_grad)
    return 4 * trained + (0 if large_frozen(runtime.model) else bytes_of(parameters) - trained)


class PlainCopy:
    """A copy of a trial. Large frozen parameters are not copied.

    The caller restores the state outside of the copy that its steps change (lists, globals, variables that the task's
    methods name).

    Args:
        b: Index of the trial in the array.
        array: Array that may hold the trial's gradients, which an earlier step has left.

    Raises:
        FusionError: The trial cannot be copied.
    """

    def __init__(self, task: Task, runtime: TrialRuntime, b: int = 0, array: ModelArray | None = None) -> None:
        self.runtime = copy_trial(runtime)
        self.take_gradients(runtime, b, array)
        if not runtime.step:
            self.runtime.set_train_mode(train=True)  # as after the build, or after a validation
        self.loss = torch.tensor(torch.nan)
        self.error: Exception | None = None
        """Exception of the last step; None without one."""
        self._task = task
        self._stepper = PlainStepper(task, [self.runtime], check_draws=True, keep_shared=True)
        self._last: tuple[Any, int] = (None, 0)

    def step(self, runtime: TrialRuntime, batch: Any, tick: int) -> None:
        """Take a step with the settings that the trial's optimizers have now; `loss` or `error` is its result."""
        self._last = batch, tick
        for own, one in zip(optimizers_in(self.runtime.optimizer), optimizers_in(runtime.optimizer), strict=True):
            for own_group, group in zip(own.param_groups, one.param_groups, strict=False):
                own_group |= {name: value for name, value in group.items() if name != "params"}
        try:
            self.loss = self._stepper.train_step([lazy_clone(batch)], [tick])[0]
            if isinstance(self.loss, Stacked):
                raise FusionError("its loss depends on a tensor that a step of the array has put outside of its model")
        except Exception as error:  # raised if the array's step does not raise it
            self.error = error

    def validate(self, batches: Sequence[Any]) -> tuple[Mapping[str, float], list[Any]]:
        """Return metrics and outputs of the first validation batches; none if one raises an `error`.

        `loss` is that of the last batch.
        """
        self.runtime.set_train_mode(train=False)
        found = ValidationMetrics(self._task, [self.runtime])
        try:
            with torch.no_grad():
                for number, batch in enumerate(batches, start=1):
                    values = self._stepper.validate_batch(0, lazy_clone(batch), -number, reuse=False)
                    self.loss = values[0]["valid_loss"]
                    found.add_each([values], size_of(batch))
        except Exception as error:
            self.error = error
        return found.so_far()[0]

    @torch.no_grad()
    def follow(self, runtime: TrialRuntime) -> None:
        """Take over parameters, buffers and optimizer state of the trial."""
        theirs = tensors_of(runtime)
        for key, own in tensors_of(self.runtime).items():
            value = theirs.get(key)
            if key[0] == "gradient" or own is None or value is None or is_same_memory(own, value):
                continue
            if own.shape == value.shape and own.layout is torch.strided:
                own.detach().copy_(value)
        self.runtime.epoch = runtime.epoch

    def take_gradients(self, runtime: TrialRuntime, b: int = 0, array: ModelArray | None = None) -> None:
        """Take over the gradients of the trial, which are its parameters' own or rows of those of the array."""
        own = dict(self.runtime.model.named_parameters())
        theirs = dict(runtime.model.named_parameters())
        for (kind, name), grad in tensors_of(runtime, b, array).items():
            if kind == "gradient" and name in own and own[name] is not theirs[name]:
                grad = grad if theirs[name].grad is None else theirs[name].grad
                own[name].grad = None if grad is None else grad.detach().clone()

    @torch.no_grad()
    def _perturbed(self, relative: float) -> "PlainCopy":
        other = PlainCopy(self._task, self.runtime)
        generator = torch.Generator().manual_seed(0)
        for each in other.runtime.model.parameters():
            if (each.is_floating_point() or each.is_complex()) and not is_shared(each):
                signs = torch.randint(0, 2, each.shape, generator=generator).to(each.device) * 2 - 1
                each.add_(each * signs * relative)
        return other

    def twins(self, relative: float) -> "Iterator[PlainCopy]":
        """Yield a copy of this copy, and one whose parameters are off by a relative change of random sign."""
        yield PlainCopy(self._task, self.runtime)
        yield self._perturbed(relative)

    def repeat_in(self, other: "PlainCopy") -> "PlainCopy":
        """Let another copy take a step as the last one was; return it."""
        batch, tick = self._last
        other.step(self.runtime, batch, tick)
        return other

    def tensors(self) -> dict[TensorKey, Tensor | None]:
        """Return the loss of the last step, and the tensors of the trial."""
        return {("loss", ""): self.loss, **tensors_of(self.runtime)}


class _WholeCopies(TorchFunctionMode):
    """Copies rows of an array without the other rows, and tensors of a graph without the graph."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__ and (not args[0].is_leaf or _is_row(args[0])):
            tensor, memo = args
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.is_leaf and tensor.requires_grad)
            return memo[id(tensor)]
        return func(*args, **(kwargs or {}))


_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


def _of_same_memory(parameter: nn.Parameter) -> nn.Parameter:
    """Return a frozen parameter with the memory and the version of another one, so that only writes reach that one."""
    return nn.Parameter(parameter.detach(), requires_grad=False) if type(parameter) is nn.Parameter else parameter


def _is_row(tensor: Tensor) -> bool:
    """Whether a tensor is a part of larger memory."""
    return tensor.layout is torch.strided and tensor.untyped_storage().nbytes() > tensor.nbytes


def copy_trial(runtime: TrialRuntime) -> TrialRuntime:
    """Copy model, optimizers and loss scale of a trial; parameters and state that are rows of an array become whole.

    Large frozen parameters use the memory of the trial's.

    Raises:
        FusionError: The trial cannot be copied.
    """
    model = runtime.model
    frozen = large_frozen(model)
    memo: dict[int, Any] = {id(each): _of_same_memory(each) for each in frozen}
    record_shared((*frozen, *memo.values()))
    leaves, spec = pytree.tree_flatten(runtime.optimizer)
    held = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Optimizer)]
    optimizers = list({id(one): one for one in (*leaves, *held)}.values())
    if any(getattr(one, kind, None) for one in optimizers for kind in _HOOKS):
        raise FusionError("an optimizer has hooks around its step, whose variables a copy of it would share")
    with _WholeCopies():
        copied, copies = copy_training(model, optimizers, memo)
    own = dict(zip(map(id, optimizers), copies, strict=True))
    return replace(
        runtime,
        model=copied,
        gradients=KeptGradients(copied, runtime.gradients.kept),
        optimizer=pytree.tree_unflatten([own[id(one)] for one in leaves], spec),
        scheduler=None,
        carried=None,
        reports=[],
        average={},
        loss_scale=None if runtime.loss_scale is None else replace(runtime.loss_scale),
    )
