"""Models of one structure as one model with an axis B."""

import copy
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import shoal.fuse.dispatch  # gives Stacked its rules  # noqa: F401
from shoal.errors import FusionError
from shoal.fuse.randomness import Randomness, member_keys, randomness
from shoal.fuse.slots import Slot, find_slots
from shoal.fuse.stacked import NeedsMemberError, Stacked
from shoal.fuse.structure import entries, mismatch

__all__ = ["ModelArray", "concat", "fuse"]

_log = logging.getLogger("shoal.fuse")


class ModelArray(nn.Module):
    """B models of one structure, run as one.

    Its parameters and buffers are the members', stacked: a member's [F, E] weight is a row of a [B, F, E] parameter. The
    members live on as ordinary modules whose tensors are views of those rows, so they are always up to date, and
    `unfuse` hands them back as they are. A model is a member of one array at a time: fusing it again moves it.

    Args:
        members: models of equal structure; see `fuse`.
        seeds: of the members' random numbers (dropout), one each.
    """

    def __init__(self, members: Sequence[nn.Module], seeds: Sequence[int]) -> None:
        super().__init__()
        self.__dict__["members"] = tuple(members)  # not submodules: their tensors are views of this module's own
        self.seeds = tuple(seeds)
        self.tick = 0
        """Number of the next call; members' random numbers depend on it and on their seeds alone."""
        self._single: set[Any] = set()
        self._proven: set[Any] = set()
        self.stacked = nn.Module()
        self.__dict__["_stage"] = _shallow_copy(members[0])
        self.__dict__["_slots"] = find_slots(self._stage, members)
        for slot in self._slots:
            if slot.registered:
                _register(self.stacked, slot)
        self.training = members[0].training
        self._adopt()

    def __len__(self) -> int:
        return len(self.members)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Every member's output, stacked: [B, N, ...] where a member gives [N, ...]. Plain inputs are shared."""
        return self.map(_call, args, kwargs)

    def map(self, fn: Callable[..., Any], *batch: Any) -> Any:
        """Like `[fn(member, *batch) for member in members]`, at once.

        Args:
            fn: takes a model and a batch and returns tensors, nested as it likes. It sees one member's shapes.
            batch: shared by all members, or `Stacked`.

        Returns:
            What `fn` returns, each tensor with a leading axis B.
        """
        key = (getattr(fn, "__func__", fn), self.training)
        tick, self.tick = self.tick, self.tick + 1
        keys = member_keys(self.seeds, tick)
        if key not in self._single:
            before = None if key in self._proven else [buffer.clone() for buffer in self.stacked.buffers()]
            try:
                with self.open(keys) as model:
                    result = fn(model, *batch)
                self._proven.add(key)
                return pytree.tree_map(self._all, result)
            except NeedsMemberError as reason:
                if before is None:  # it had run for all at once: what it changed cannot be told apart any more
                    raise FusionError(f"{fn} ran for all members before and now needs them apart: {reason}") from reason
                for buffer, saved in zip(self.stacked.buffers(), before, strict=True):
                    buffer.copy_(saved)
                self._single.add(key)
                _log.warning("%s runs member by member: %s", getattr(fn, "__qualname__", fn), reason)
        return self._each(fn, keys, batch)

    @contextmanager
    def open(self, keys: Tensor | None = None) -> Iterator[nn.Module]:
        """The members as one model of the user's own class, whose tensors are `Stacked`.

        Args:
            keys: of the random numbers drawn within, int64 [B]; by default those of the next call.
        """
        if keys is None:
            keys = member_keys(self.seeds, self.tick)
            self.tick += 1
        self._fill([slot.data for slot in self._slots])
        with randomness(Randomness(keys)):
            yield self._stage

    def unfuse(self) -> list[nn.Module]:
        """The members themselves: their own classes, with their current weights and buffers."""
        return list(self.members)

    def select(self, indices: Sequence[int]) -> "ModelArray":
        """A new array of some members, in the order given. The members leave this one, which is to be dropped."""
        array = ModelArray([self.members[i] for i in indices], [self.seeds[i] for i in indices])
        array.tick = self.tick
        return array

    def train(self, mode: bool = True) -> "ModelArray":
        """Set all members, and modules within them, to training or evaluation."""
        self.training = mode
        self._stage.train(mode)
        for member in self.members:
            member.train(mode)
        return self

    def columns(self) -> Iterator[tuple[str, Tensor, list[Tensor]]]:
        """Every stacked tensor with its path and the members' own tensors, which are views of its rows."""
        for slot in self._slots:
            if slot.registered:
                yield slot.path, slot.data, slot.own

    def _all(self, value: Any) -> Any:
        if isinstance(value, Stacked):
            return value.all
        if isinstance(value, Tensor):
            return value.expand(len(self), *value.shape)
        if isinstance(value, (bool, int, float)):
            return torch.full((len(self),), value)
        return value

    def _each(self, fn: Callable[..., Any], keys: Tensor, batch: tuple[Any, ...]) -> Any:
        """The same by arrays of one, which can answer for a number."""
        rows = [slot.data.split(1) for slot in self._slots]
        results = []
        for b in range(len(self)):
            self._fill([row[b] for row in rows])
            with randomness(Randomness(keys[b : b + 1])):
                mine = pytree.tree_map(lambda x, b=b: Stacked(x.all[b : b + 1]) if isinstance(x, Stacked) else x, batch)
                result = fn(self._stage, *mine)
            results.append(pytree.tree_map(lambda x: x.all if isinstance(x, Stacked) else x, result))
        leaves, specs = zip(*(pytree.tree_flatten(result) for result in results), strict=True)
        joined = [self._join(column) for column in zip(*leaves, strict=True)]
        return pytree.tree_unflatten(joined, specs[0])

    def _join(self, column: tuple[Any, ...]) -> Any:
        if isinstance(column[0], Tensor):
            return torch.cat([value if value.dim() and len(value) == 1 else value.unsqueeze(0) for value in column])
        return torch.tensor(column)

    def _fill(self, tensors: list[Tensor]) -> None:
        for slot, tensor in zip(self._slots, tensors, strict=True):
            slot.fill(Stacked(tensor, slot.number))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ModelArray":
        super()._apply(fn, recurse)
        for slot in self._slots:
            if not slot.registered:
                slot.data = fn(slot.data)
        self._adopt()
        return self

    def _adopt(self) -> None:
        """Make the members' tensors views of the stacked ones."""
        for slot in self._slots:
            if slot.registered:
                slot.data = _registered(self.stacked, slot.path)
                for own, row in zip(slot.own, slot.data.detach().unbind(0), strict=True):
                    own.data = row


def fuse(models: Sequence[nn.Module], seeds: Sequence[int] | None = None) -> ModelArray:
    """Make one array of models of equal structure; they may differ in values and in float attributes.

    Args:
        models: at least one, each an own object, all on one device, in one mode (training or evaluation).
        seeds: of the members' random numbers; by default drawn from torch's default generator.

    Raises:
        FusionError: no models, the same model twice, or models that differ: names the member and the module path.
    """
    models = list(models)
    if not models:
        raise FusionError("cannot fuse an empty list of models")
    owners: dict[int, int] = {}
    for b, model in enumerate(models):
        for name, parameter in model.named_parameters():
            if owners.setdefault(id(parameter), b) != b:
                other = owners[id(parameter)]
                raise FusionError(f"members {other} and {b} share the parameter {name!r}; give each a model of its own")
    first = entries(models[0])
    for b, model in enumerate(models[1:], start=1):
        difference = mismatch(first, entries(model))
        if difference:
            raise FusionError(f"member {b} differs from member 0 {difference}; fuse only models of one structure")
    devices = {tensor.device for model in models for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) > 1:
        raise FusionError(f"the members lie on several devices, {sorted(map(str, devices))}; move them to one first")
    if seeds is None:
        seeds = torch.randint(0, 2**62, (len(models),)).tolist()
    if len(seeds) != len(models):
        raise FusionError(f"{len(models)} models need as many seeds, got {len(seeds)}")
    return ModelArray(models, seeds)


def concat(arrays: Sequence[ModelArray]) -> ModelArray:
    """One array of the members of several, in order; the arrays themselves are to be dropped.

    Raises:
        FusionError: their structures differ, or they have run a different number of steps.
    """
    ticks = {array.tick for array in arrays}
    if len(ticks) > 1:
        raise FusionError(f"arrays that have been called {sorted(ticks)} times cannot be joined: random numbers differ")
    joined = fuse([m for array in arrays for m in array.members], [s for array in arrays for s in array.seeds])
    joined.tick = arrays[0].tick
    return joined


def _call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return model(*args, **kwargs)


def _shallow_copy(model: nn.Module) -> nn.Module:
    """The same modules with the same tensors, ready to have other tensors put in their places."""
    tensors = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors})


def _register(root: nn.Module, slot: Slot) -> None:
    *path, name = slot.path.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root._modules[part]  # type: ignore[assignment]
    if isinstance(slot.own[0], nn.Parameter):
        root.register_parameter(name, nn.Parameter(slot.data, requires_grad=slot.own[0].requires_grad))
    else:
        root.register_buffer(name, slot.data)


def _registered(root: nn.Module, path: str) -> Tensor:
    *modules, name = path.split(".")
    for part in modules:
        root = root._modules[part]  # type: ignore[assignment]
    tensor = root._parameters[name] if name in root._parameters else root._buffers[name]
    return tensor  # type: ignore[return-value]
