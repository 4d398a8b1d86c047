"""Models of one structure as one model with an axis B."""

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.errors import FusionError
from shoal.fuse.intercept import MemberFunctions
from shoal.fuse.join import join, spread
from shoal.fuse.randomness import Randomness, member_keys, other_generators, randomness
from shoal.fuse.rows import rows
from shoal.fuse.slots import Slot, find_slots, tensors_within
from shoal.fuse.stacked import NeedsMemberError, Stacked, events
from shoal.fuse.structure import entries, mismatch, obstacle

__all__ = ["ModelArray", "concat", "fuse"]

_log = logging.getLogger("shoal.fuse")


class ModelArray(nn.Module):
    """B models of one structure, run as one.

    Its parameters and buffers are the members', stacked: a member's [F, E] weight is a row of a [B, F, E] parameter.
    The members live on as ordinary modules whose tensors are views of those rows, so they are always up to date, and
    `unfuse` hands them back as they are. A model is a member of one array at a time: fusing it again moves it.

    Args:
        members: models of equal structure; see `fuse`.
        seeds: of the members' random numbers (dropout), one each.
    """

    members: tuple[nn.Module, ...]
    _stage: nn.Module
    _slots: list[Slot]

    def __init__(self, members: Sequence[nn.Module], seeds: Sequence[int]) -> None:
        super().__init__()
        self.__dict__["members"] = tuple(members)  # not submodules: their tensors are views of this module's own
        self.seeds = tuple(seeds)
        self.tick = 0
        """Number of the next call; members' random numbers depend on it and on their seeds alone."""
        self._single: set[Any] = set()
        self._left = False
        self.stacked = nn.Module()
        self.__dict__["_stage"] = _shallow_copy(members[0])
        self.__dict__["_slots"] = find_slots(self._stage, members)
        for slot in self._slots:
            _settle(self.stacked, slot)
        self.training = members[0].training
        self._adopt()

    def __len__(self) -> int:
        return len(self.members)

    def __reduce__(self) -> Any:
        return _rebuild, (self.members, self.seeds, self.tick)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Every member's output, stacked: [B, N, ...] where a member gives [N, ...]. Plain inputs are shared."""
        return self.map(_call, args, kwargs)

    def map(self, fn: Callable[..., Any], *batch: Any) -> Any:
        """Like `[fn(member, *batch) for member in members]`, at once.

        Args:
            fn: takes a model and a batch and returns tensors, nested as it likes. It sees one member's shapes.
            batch: shared by all members, or `Stacked`.

        Returns:
            What `fn` returns, each tensor or number as a tensor with a leading axis B.
        """
        if self._left:
            raise FusionError("the members have left this array by `select` or `concat`; use the array that came of it")
        tick, self.tick = self.tick, self.tick + 1
        keys = partial(member_keys, self.seeds, tick)
        key = (_code(fn), self.training)
        if len(self) == 1 or key in self._single or _ALL in self._single:
            return self._each(fn, keys, batch)
        before, restore = [buffer.clone() for buffer in self.stacked.buffers()], other_generators()
        bypassed = events.bypasses
        try:
            with self.open(keys) as model:
                result = fn(model, *batch)
            return pytree.tree_map(lambda value: spread(value, len(self)), result)
        except (NeedsMemberError, RuntimeError) as reason:
            if not isinstance(reason, NeedsMemberError) and events.bypasses == bypassed:
                raise
            if key not in _said:
                _said.add(key)
                _log.warning("%s runs member by member: %s", getattr(fn, "__qualname__", fn), reason)
        for buffer, saved in zip(self.stacked.buffers(), before, strict=True):
            buffer.detach().copy_(saved)
        restore()
        self._single.add(key)
        return self._each(fn, keys, batch)

    @contextmanager
    def open(self, keys: Tensor | Callable[[], Tensor] | None = None) -> Iterator[nn.Module]:
        """The members as one model of the user's own class, whose tensors are `Stacked`.

        Args:
            keys: of the random numbers drawn within, int64 [B], or what makes them; by default those of the next call.
        """
        if keys is None:
            keys = partial(member_keys, self.seeds, self.tick)
            self.tick += 1
        for slot in self._slots:
            slot.show()
        source = Randomness(keys)
        with randomness(source), MemberFunctions(len(self), source):
            yield self._stage
        for slot in self._slots:
            slot.keep()

    def unfuse(self) -> list[nn.Module]:
        """The members themselves: their own classes, with their current weights and buffers."""
        return list(self.members)

    def select(self, indices: Sequence[int]) -> "ModelArray":
        """A new array of some members, in the order given. All members leave this one, which is of no use any more.

        Raises:
            FusionError: no indices, one that is no member's, or one given twice.
        """
        wrong = [i for i in indices if isinstance(i, bool) or i not in range(len(self))]
        if wrong or not indices or len(set(indices)) < len(indices):
            raise FusionError(f"`indices` must name some of {len(self)} members, each once, got {list(indices)}")
        array = ModelArray([self.members[i] for i in indices], [self.seeds[i] for i in indices])
        array.tick = self.tick
        self._left = True
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

    def floats(self) -> list[tuple[float, ...]]:
        """The float attributes in which the members differ, one tuple for each."""
        return [slot.numbers for slot in self._slots if slot.numbers is not None]

    @contextmanager
    def replaced(self, tensors: Mapping[int, Tensor]) -> Iterator[None]:
        """Within, other tensors stand for the stacked ones, by the `id` of these; for tracing."""
        slots = [slot for slot in self._slots if slot.registered]
        before = [slot.data for slot in slots]
        for slot, own in zip(slots, before, strict=True):
            slot.home[0][slot.home[1]] = tensors[id(own)]
        try:
            yield
        finally:
            for slot, own in zip(slots, before, strict=True):
                slot.home[0][slot.home[1]] = own

    def _each(self, fn: Callable[..., Any], keys: Callable[[], Tensor], batch: tuple[Any, ...]) -> Any:
        """The same by the members themselves, their parameters being rows of the stacked ones."""
        slots = [slot for slot in self._slots if slot.registered]
        columns = [rows(slot.data) for slot in slots]
        results = []
        restore = other_generators()
        attributes = _attributes(self.members[0])
        for b, member in enumerate(self.members):
            if b:
                restore()
            mine = pytree.tree_map_only(Tensor, partial(_own, b=b, alone=len(self) == 1), batch)
            for slot, row in zip(slots, columns, strict=True):
                slot.put(b + 1, row[b])
            try:
                source = Randomness(partial(_key, keys, b), alone=True)
                with randomness(source), MemberFunctions(1, source):
                    results.append(fn(member, *mine))
                for slot, row in zip(slots, columns, strict=True):
                    slot.keep_row(b, row[b])
            finally:
                for slot in slots:
                    slot.put(b + 1, slot.own[b])
        if len(self) > 1 and any(v is not attributes.get(k) for k, v in _attributes(self.members[0]).items()):
            self._single.add(_ALL)  # the members keep state that the stage does not have
        return join(results)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ModelArray":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._adopt()
        return self

    def _adopt(self) -> None:
        """Make the members' tensors views of the stacked ones."""
        for slot in self._slots:
            slot.shown = None
            for own, row in zip(slot.own, slot.data.detach().unbind(0) if slot.own else (), strict=True):
                own.data = row


_ALL = "every function"
_said: set[Any] = set()
"""Functions whose reason to run member by member was logged."""


def fuse(models: Sequence[nn.Module], seeds: Sequence[int] | None = None) -> ModelArray:
    """Make one array of models of equal structure; they may differ in values and in float attributes.

    Args:
        models: at least one, each an own object, all on one device, in one mode (training or evaluation).
        seeds: of the members' random numbers; by default drawn from torch's default generator.

    Raises:
        FusionError: no models, the same model twice, or models that differ: names the member and the module path.
    """
    if isinstance(models, nn.Module) or not all(isinstance(model, nn.Module) for model in models):
        raise FusionError(f"`models` must be a list of torch.nn.Module, got {models!r}")
    models = list(models)
    if not models:
        raise FusionError("cannot fuse an empty list of models")
    for b, model in enumerate(models):
        if not_fusible := obstacle(model, alone=len(models) == 1):
            raise FusionError(f"member {b}: {not_fusible}")
    owners: dict[int, int] = {}
    for b, model in enumerate(models):
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if owners.setdefault(id(tensor), b) != b:
                other = owners[id(tensor)]
                raise FusionError(f"members {other} and {b} share the tensor {name!r}; give each a model of its own")
        if owners.setdefault(id(model), b) != b:
            raise FusionError(f"members {owners[id(model)]} and {b} are the same model; copy it with copy.deepcopy")
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
    joined.tick = ticks.pop()
    for array in arrays:
        array._left = True
    return joined


def _call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return model(*args, **kwargs)


def _rebuild(members: Sequence[nn.Module], seeds: Sequence[int], tick: int) -> ModelArray:
    array = ModelArray(members, seeds)
    array.tick = tick
    return array


def _code(fn: Any) -> Any:
    """What stays the same when a lambda or a bound method is made anew at every call."""
    if isinstance(fn, partial):
        return _code(fn.func)
    return getattr(getattr(fn, "__func__", fn), "__code__", fn)


def _key(keys: Callable[[], Tensor], b: int) -> Tensor:
    return keys()[b : b + 1]


def _attributes(model: nn.Module) -> dict[tuple[int, str], Any]:
    """What user code has put on the modules of a model, but for tensors, which have slots."""
    return {
        (id(module), name): value
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules", "training") and not isinstance(value, Tensor)
    }


def _own(value: Tensor, b: int, alone: bool) -> Tensor:
    """Member b's part of a batch: a slice, or what is shared, which it may change without the others' seeing it."""
    if isinstance(value, Stacked):
        return value.whole[b]
    return value if alone else value.clone()


def _shallow_copy(model: nn.Module) -> nn.Module:
    """The same modules with the same tensors, ready to have other tensors put in their places."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors_within(model)})


def _settle(root: nn.Module, slot: Slot) -> None:
    """Make the stacked tensor of a slot, as a parameter or buffer under its path if the members' are."""
    if not slot.own:
        return
    data = torch.stack([value.detach() for value in slot.own])
    if not slot.registered:
        slot.home = ({"": data}, "")
        return
    *path, name = slot.path.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    if isinstance(slot.own[0], nn.Parameter):
        root.register_parameter(name, nn.Parameter(data, requires_grad=slot.own[0].requires_grad))
        slot.home = (root._parameters, name)
    else:
        root.register_buffer(name, data)
        slot.home = (root._buffers, name)
