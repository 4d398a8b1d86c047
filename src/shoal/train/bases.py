"""Base models of a task: each is built once in a process, and the models of all trials use its memory."""

import copy
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from shoal.core.activity import Activity
from shoal.core.errors import FusionError, TaskError, UnusableTaskError
from shoal.core.trial import Config
from shoal.fuse.frozen import is_lent, lent_copy, unshare
from shoal.fuse.generators import PythonRngSnapshot, preserved_rng, seed_all
from shoal.fuse.quantised import prepare_quantised, state_tensors
from shoal.fuse.rows import is_packed, packed_state, storage_address
from shoal.host.activity_clock import during
from shoal.task import Task, call
from shoal.train.checkpoint import Weights
from shoal.train.data.tracked_config import config_matches, values_read

__all__ = ["Bases", "base_changed", "bases_of", "check_base", "lent_parameters", "move", "read_only", "without_data"]

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
        f"{what} writes to {name!r} of the task's `base`, which all trials share; unfreeze it in `model`, which then "
        "has a copy of its own, or build there what trials change"
    )


def check_base(base: str, weights: Weights) -> None:
    """Refuse weights that were trained on a base of other values, as `base_fingerprint` has them."""
    if weights.base != base:
        raise UnusableTaskError(
            f"trial {weights.trial} was trained on another base than the task's `base` returns now; let it return the "
            "model of before, such as by the revision of a pretrained one"
        )


@dataclass(eq=False)
class _Base:
    """A base model that a task built.

    Args:
        read: What `base` read of the config.
        on_meta: The model without values; None if `base` returned None.
        module: The model; None if it was dropped.
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
        return () if base is None or base.on_meta is None else ("base", sorted(base.read.items()))

    def reads_all(self, config: Config) -> bool:
        """Whether `base` read all values of a config, as by `dict(config)`, so that other values give another base."""
        base = self._find(config)
        return base is not None and base.on_meta is not None and len(config) > 1 and config.keys() <= base.read.keys()

    def model(self, config: Config, meta: bool = False) -> Any:
        """Return what the task's `model` returns for a config, which it is given as it is.

        Args:
            meta: Whether to give it a base on the meta device.

        A parameter of the base that it unfreezes gets memory of its own.

        Raises:
            TaskError: `model` writes to the base.
        """
        base = self._find(config)
        if base is not None:
            self._check_arguments(0 if base.on_meta is None else 1)
        if base is None or base.on_meta is None:
            return call(self._task, "model", config)
        if meta:
            return call(self._task, "model", config, copy.deepcopy(base.on_meta))
        lent = lent_copy(self._placed(base, config))
        parameters = dict(lent.named_parameters())
        with read_only(parameters, partial(base_changed, "the task's `model`")):
            model = call(self._task, "model", config, lent)
        for each in parameters.values():
            if each.requires_grad:
                unshare(each)
        if isinstance(model, nn.Module):
            base.users = [user for user in base.users if user() is not None] + [ref(model)]
        return model

    def _check_arguments(self, bases: int) -> None:
        signature = inspect.signature(self._task.model)
        try:
            signature.bind(*[None] * (1 + bases))
        except TypeError as error:
            returned, wanted = ("a model", "config, base") if bases else ("None", "config, base=None")
            raise TaskError(
                f"the task's `base` returns {returned}, so its `model` must be model(self, {wanted}), but takes "
                f"{signature}"
            ) from error

    def load(self, config: Config) -> None:
        """Build the base of a config, if there is one, and move it to the device."""
        if (base := self._find(config)) is not None and base.on_meta is not None:
            self._placed(base, config)

    def drop(self) -> None:
        """Build bases anew for models to come, as one was changed."""
        for base in self._known:
            base.module = None

    def leave_device(self) -> None:
        """Move bases that no model uses to the host; those of quantised layers are dropped."""
        for base in self._known:
            if base.module is not None and all(user() is None for user in base.users):
                packed = any(map(is_packed, base.module.parameters()))
                base.module = None if packed else base.module.to("cpu")

    def _placed(self, base: _Base, config: Config) -> nn.Module:
        if base.module is None:
            base.module = self._built(config)[0]
        assert base.module is not None
        base.module = move(base.module, self._device)
        return base.module

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
                module, read = values_read(self._task.base, dict.copy(config) if isinstance(config, dict) else config)
            finally:
                others.restore()
        if module is not None and not isinstance(module, nn.Module):
            raise TaskError(f"the task's `base` must return a torch.nn.Module or None, got {module!r}")
        if module is not None and any(map(is_packed, module.requires_grad_(False).parameters())):
            module = move(module, self._device)  # which quantises it, and changes its structure
        return module, read


def lent_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters of a model that lie in the memory of a base, by name."""
    return {name: each for name, each in model.named_parameters() if is_lent(each)}


def read_only(parameters: Mapping[str, Tensor], refused: Callable[[str], Exception]) -> AbstractContextManager[Any]:
    """Context manager in which a write to the memory of parameters raises, before it takes place, the error that
    `refused` returns for its name."""
    return _ReadOnly(parameters, refused) if parameters else nullcontext()


class _ReadOnly(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses writes to the memory of parameters, also through `.data`."""

    def __init__(self, parameters: Mapping[str, Tensor], refused: Callable[[str], Exception]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._refused = refused
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
                        raise self._refused(name)
        return func(*args, **kwargs)


def move(model: nn.Module, device: torch.device) -> nn.Module:
    """Move a model to a device, which quantises the weights of quantised layers, and let these layers be trainable."""
    moved = model.to(device)
    try:
        prepare_quantised(moved)
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
