"""Base models of a task: each is built once in a process, and the models of all trials use its memory."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from shoal.core.activity import Activity
from shoal.core.errors import FusionError, TaskError
from shoal.core.trial import Config
from shoal.fuse.frozen import lent_copy
from shoal.fuse.generators import PythonRngSnapshot, preserved_rng, seed_all
from shoal.fuse.quantised import settle, state_tensors
from shoal.fuse.rows import is_packed, packed_state, storage_address
from shoal.host.activity_clock import during
from shoal.task import Task, call
from shoal.train.data.tracked_config import config_matches, values_read

__all__ = ["Bases", "base_changed", "bases_of", "move", "without_data"]

_all: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Task -> its bases by device."""


def bases_of(task: Task, device: torch.device) -> "Bases":
    """Return the bases of a task in this process, as long as the task is in use."""
    if task not in _all:
        _all[task] = {}
    found: dict[torch.device, Bases] = _all[task]
    return found.setdefault(device, Bases(task, device))


def base_changed(what: str, name: str) -> TaskError:
    """Return the error for a parameter of a base that is changed."""
    return TaskError(
        f"{what} writes to or unfreezes {name!r} of the task's `base`, which all trials share; put a copy in its place "
        "in `model` (modules_to_save of peft does), or build in `model` what trials change"
    )


@dataclass(eq=False)
class _Base:
    """A base model that a task built.

    Args:
        read: What `base` read of the config.
        on_meta: The model without values; None if `base` returned None.
        module: The model, on the device; None if it was dropped.
        users: The models that use its memory.
    """

    read: Mapping[str, Any]
    on_meta: nn.Module | None
    module: nn.Module | None
    users: list["ref[nn.Module]"] = field(default_factory=list)


class Bases:
    """Builds the base models of a task, and the models of its trials on them.

    A base is kept as long as a model of it is in use; one that is not, until another one is built.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        self._ref = ref(task)
        self._device = device
        self._known: list[_Base] = []

    @property
    def _task(self) -> Task:
        task = self._ref()
        assert task is not None
        return task

    def key(self, config: Config) -> tuple[object, ...]:
        """Return a key that differs between configs of other bases; () without a base."""
        base = self._find(config)
        return () if base is None else ("base", sorted(base.read.items()))

    def model(self, config: Config, meta: bool = False) -> Any:
        """Return what the task's `model` returns for a config, which it is given as it is.

        Args:
            meta: Whether to give it a base on the meta device.

        Raises:
            TaskError: `model` writes to the base, or lets it train.
        """
        base = self._find(config)
        if base is None or base.on_meta is None:
            return call(self._task, "model", config)
        if meta:
            return call(self._task, "model", config, copy.deepcopy(base.on_meta))
        if base.module is None:
            base.module = self._built(config)[0]
            assert base.module is not None
        lent = lent_copy(base.module)
        parameters = dict(lent.named_parameters())
        with _ReadOnly(parameters):
            model = call(self._task, "model", config, lent)
        for name, each in parameters.items():
            if each.requires_grad:
                raise base_changed("the task's `model`", name)
        if isinstance(model, nn.Module):
            base.users = [user for user in base.users if user() is not None] + [ref(model)]
        return model

    def _find(self, config: Config) -> _Base | None:
        if type(self._task).base is Task.base:
            return None
        for base in self._known:
            if config_matches(config, base.read):
                return base
        module, read = self._built(config)
        self._known.append(_Base(read, None if module is None else without_data(module), module))
        return self._known[-1]

    def _built(self, config: Config) -> tuple[nn.Module | None, Mapping[str, Any]]:
        """Build a base, after those that no model uses are dropped; return it and what `base` read of the config."""
        for base in self._known:
            if all(user() is None for user in base.users):
                base.module = None
        with during(Activity.BUILD), preserved_rng(self._device):
            others = PythonRngSnapshot()
            seed_all(0, self._device)  # so it is the same in every process, and after a resume
            try:
                module, read = values_read(self._task.base, config)
            finally:
                others.restore()
        if module is not None and not isinstance(module, nn.Module):
            raise TaskError(f"the task's `base` must return a torch.nn.Module or None, got {module!r}")
        return None if module is None else move(module.requires_grad_(False), self._device), read


class _ReadOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses writes to the memory of parameters, also through `.data`."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {address: name for name, each in parameters.items() if (address := storage_address(each))}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for number, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = args[number] if number < len(args) else kwargs.get(argument.name)
                for each in pytree.tree_leaves(value):
                    if isinstance(each, Tensor) and (name := self._names.get(storage_address(each))):
                        raise base_changed("the task's `model`", name)
        return func(*args, **kwargs)


def move(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device, which quantises the weights of quantised layers, and let these layers be trainable."""
    moved = model.to(device)
    try:
        settle(moved)
    except FusionError as error:
        raise TaskError(f"a model of the task cannot be trained: {error}") from error
    return moved


def _packed_without_data(packed: Tensor, empty: Tensor) -> Tensor:
    """A packed parameter of the same class and settings, which `peft` reads, whose scales are on the meta device."""
    memo = {id(each): each.detach().to("meta") for each in packed_state(packed).values() if isinstance(each, Tensor)}
    made: Tensor = Tensor._make_subclass(type(packed), empty, False)
    held = {name: None if isinstance(each, nn.Module) else each for name, each in vars(packed).items()}
    vars(made).update(copy.deepcopy(held, memo))
    return made


def without_data(model: nn.Module) -> nn.Module:
    """Return the model if it is on the meta device; else a copy on it, since the task may hold parts of the model."""
    tensors = [each for each in (*model.parameters(), *model.buffers()) if not is_lazy(each)]
    if all(each.is_meta for each in tensors):
        return model
    memo: dict[int, Any] = {id(each): each.detach().to("meta") for each in state_tensors(model)}
    for each in tensors:
        empty = each.detach().to("meta")
        if is_packed(each) and not hasattr(each, "__tensor_flatten__"):
            memo[id(each)] = _packed_without_data(each, empty)
        else:
            memo[id(each)] = nn.Parameter(empty, each.requires_grad) if isinstance(each, nn.Parameter) else empty
    return copy.deepcopy(model, memo)
