"""Models of one structure as one model with an axis B."""

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.errors import FusionError
from shoal.fuse.absent import forget
from shoal.fuse.apart import Apart, own_parameters, put_apart
from shoal.fuse.checks import check_members, modules_apart
from shoal.fuse.frozen import lend_frozen
from shoal.fuse.intercept import MemberFunctions, member_run
from shoal.fuse.join import join, spread
from shoal.fuse.plain import PlainState, attributes_of
from shoal.fuse.randomness import Drawn, OtherGenerators, Randomness, member_keys, randomness
from shoal.fuse.rows import rows
from shoal.fuse.slots import Slot, find_slots, tensors_within
from shoal.fuse.stacked import NeedsMemberError, SharedWriteError, Stacked, events

__all__ = ["ModelArray", "concat", "fuse"]

_log = logging.getLogger("shoal.fuse")


class ModelArray(nn.Module):
    """B models of one structure, run as one.

    Its parameters and buffers are the members', stacked: a member's [F, E] weight is a row of a [B, F, E] parameter. A
    frozen parameter with equal values in all members is kept once, [F, E], and what is computed of it alone is computed
    once. Submodules in which the members differ run member by member and keep their own tensors.

    The members live on as ordinary modules whose tensors are views of those rows, so they are always up to date, and
    `unfuse` hands them back as they are. A model is a member of one array at a time: fusing it again moves it.

    Args:
        members: models that `check_members` accepts.
        seeds: of the members' random numbers (dropout), one each.
        strict: whether the members must not differ in any submodule.
    """

    members: tuple[nn.Module, ...]
    _stage: nn.Module
    _slots: list[Slot]
    _apart: list[Apart]
    _plain: PlainState

    def __init__(self, members: Sequence[nn.Module], seeds: Sequence[int], strict: bool = True) -> None:
        super().__init__()
        paths = modules_apart(members, strict)
        self.__dict__["members"] = tuple(members)  # not submodules: their tensors are views of this module's own
        self.seeds = tuple(seeds)
        self.strict = strict
        self.tick = 0
        """Number of the next call; members' random numbers depend on it and on their seeds alone."""
        self.version = 0
        """Grows when parameters are frozen or unfrozen; a captured step of before is then out of date."""
        self._single: set[Any] = set()
        """Functions that run member by member."""
        self._quiet: set[Any] = set()
        """Functions that have run at once and drawn no numbers from generators that know no members."""
        self._silent: set[Any] = set()
        """Functions that a member has run by itself and that have drawn no random numbers at all."""
        self._spare: list[Tensor] | None = None
        """Where a member's buffers are copied to while such a function runs."""
        self._ran: set[Any] = set()
        """Functions that have run for all members at once."""
        self._left = False
        self.stacked, self.frozen = nn.Module(), nn.Module()
        stage = _shallow_copy(members[0])
        self.__dict__["_apart"] = put_apart(stage, members, paths)
        own = zip(*(part.own for part in self._apart), strict=True)  # of each member
        self.separate = nn.ModuleList(map(nn.ModuleList, own))
        self.__dict__["_stage"] = stage
        self.__dict__["_slots"] = find_slots(stage, members, paths)
        for slot in self._slots:
            slot.settle(self.stacked, self.frozen)
        self.__dict__["_plain"] = PlainState(
            stage, members, [place for slot in self._slots for places in slot.places for place in places]
        )
        self.training = members[0].training

    def __len__(self) -> int:
        return len(self.members)

    def __reduce__(self) -> Any:
        return _rebuild, (self.members, self.seeds, self.strict, self.tick)

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
        self._refuse_left()
        self.check_batch(batch)
        tick, self.tick = self.tick, self.tick + 1
        keys = partial(member_keys, self.seeds, tick)
        key = (_code(fn), self.training)
        if len(self) == 1 or key in self._single or _ALL in self._single:
            return self._each(fn, keys, batch)
        saved, frozen = self._save(all=key not in self._ran), self._frozen_versions()
        others = None if key in self._quiet else OtherGenerators()
        while True:
            bypassed = events.bypasses
            alike = [slot for slot in self._slots if slot.alike]
            try:
                with self.open(keys) as model:
                    result = fn(model, *batch)
                self._ran.add(key)
                if others is not None and not others.moved():
                    self._quiet.add(key)
                return pytree.tree_map(lambda value: spread(value, len(self)), result)
            except (NeedsMemberError, RuntimeError) as error:
                if not isinstance(error, NeedsMemberError) and events.bypasses == bypassed:
                    raise
                reason = str(error)
                written = self._shared_slot(error)
            if key in self._ran and self._frozen_versions() != frozen:
                raise FusionError(
                    "a function has changed frozen parameters that are kept once for all members, and then could not "
                    f"go on for all of them: {reason}; register what it changes as buffers"
                )
            for tensor, value in saved:
                tensor.copy_(value)
            if others is not None:
                others.restore()
            if written is not None:
                written.part(self.stacked)
                self.version += 1
                saved, frozen = self._save(all=True), self._frozen_versions()
                continue
            if not alike:
                break
            for slot in alike:  # it may be that one of them is to be changed for each member
                slot.alike = False
        if key not in _said:
            _said.add(key)
            _log.warning("%s runs member by member: %s", getattr(fn, "__qualname__", fn), reason)
        self._single.add(key)
        return self._each(fn, keys, batch)

    def one_by_one(self, fn: Callable[..., Any], *batch: Any, forward: bool = False) -> Iterator[Any]:
        """What `fn` returns for one member after another, each run when it is asked for.

        The members run as they are: gradients go to their own parameters, not to the array's.

        Args:
            fn: as for `map`.
            batch: as for `map`.
            forward: `fn` changes nothing but buffers, and so may be run a second time.
        """
        self._refuse_left()
        self.check_batch(batch)
        self.follow_own()
        tick, self.tick = self.tick, self.tick + 1
        keys = partial(member_keys, self.seeds, tick)
        slots = [slot for slot in self._slots if slot.registered and not slot.shared]
        others = OtherGenerators() if len(self) > 1 else None
        key = (_code(fn), self.training)
        for b, member in enumerate(self.members):
            if b and others is not None:
                others.restore()
            silent = forward and key in self._silent
            alone = len(self) == 1 and not silent
            mine = pytree.tree_map_only(Tensor, partial(_own, b=b, alone=alone), batch)
            try:
                done, result = self._undrawn(fn, b, mine) if silent else (False, None)
                if not done:
                    if silent:
                        mine = pytree.tree_map_only(Tensor, partial(_own, b=b, alone=alone), batch)
                    source = Randomness(partial(_key, keys, b), alone=True)
                    with member_run(source):
                        result = fn(member, *mine)
                    (self._silent.discard if source.calls else self._silent.add)(key)
            except BaseException:
                for slot in slots:
                    slot.put(b + 1, slot.own[b])
                raise
            for slot in slots:
                slot.keep_row(b, slot.own[b])
            self._check_shared()
            yield result

    def _undrawn(self, fn: Callable[..., Any], b: int, batch: tuple[Any, ...]) -> tuple[bool, Any]:
        """Run a function that has drawn no random numbers before without looking at what it does, which is quicker.

        Returns:
            Whether it has drawn none this time, and its result; if it has, its buffers are as they were before.
        """
        buffers = [slot.own[b] for slot in self._slots if slot.registered and not slot.trainable]
        if self._spare is None:
            self._spare = [torch.empty_like(buffer) for buffer in buffers]
        if buffers:
            torch._foreach_copy_(self._spare, buffers)
        drawn = Drawn(next((slot.own[b].device for slot in self._slots if slot.own), torch.device("cpu")))
        result = fn(self.members[b], *batch)
        if not drawn():
            return True, result
        for buffer, saved in zip(buffers, self._spare, strict=True):
            buffer.copy_(saved)
        return False, None

    @contextmanager
    def open(self, keys: Tensor | Callable[[], list[int]] | None = None) -> Iterator[nn.Module]:
        """The members as one model of the user's own class, whose tensors are `Stacked`.

        Args:
            keys: of the random numbers drawn within, int64 [B], or what makes them; by default those of the next call.
        """
        if keys is None:
            keys = partial(member_keys, self.seeds, self.tick)
            self.tick += 1
        self.follow()
        forget(self.stacked.parameters())
        for slot in self._slots:
            slot.show()
        source = Randomness(keys)
        try:
            with randomness(source), MemberFunctions(len(self), source):
                yield self._stage
        except BaseException:
            for slot in self._slots:
                slot.keep_alike()
            raise
        for slot in self._slots:
            slot.keep()
        self._plain.push()

    def unfuse(self) -> list[nn.Module]:
        """The members themselves: their own classes, with their current weights and buffers.

        Nothing is copied. Their tensors still are views of the array's, and a frozen parameter that is kept once is
        one memory for all: `copy.deepcopy` a member to have it by itself, or before it is saved or unfrozen alone.
        """
        return list(self.members)

    def select(self, indices: Sequence[int]) -> "ModelArray":
        """A new array of some members, in the order given. All members leave this one, which is of no use any more.

        Raises:
            FusionError: no indices, one that is no member's, or one given twice.
        """
        wrong = [i for i in indices if isinstance(i, bool) or i not in range(len(self))]
        if wrong or not indices or len(set(indices)) < len(indices):
            raise FusionError(f"`indices` must name some of {len(self)} members, each once, got {list(indices)}")
        array = ModelArray([self.members[i] for i in indices], [self.seeds[i] for i in indices], self.strict)
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

    def requires_grad_(self, requires_grad: bool = True) -> "ModelArray":
        """Freeze or unfreeze all parameters, the members' own with them.

        Raises:
            FusionError: a frozen parameter that is kept once was to be unfrozen.
        """
        for slot in self._slots:
            slot.check_requires_grad(requires_grad)
        for member in self.members:
            member.requires_grad_(requires_grad)
        self._follow_slots()
        return self

    def columns(self) -> Iterator[tuple[str, Tensor, list[Tensor]]]:
        """Every stacked tensor with its path and the members' own tensors, which are views of its rows."""
        for slot in self._slots:
            if slot.registered and not slot.shared:
                yield slot.path, slot.data, slot.own

    def shared(self) -> Iterator[tuple[str, Tensor, list[Tensor]]]:
        """Every frozen parameter that is kept once, [*shape], with its path and the members' own."""
        for slot in self._slots:
            if slot.shared:
                yield slot.path, slot.data, slot.own

    def apart(self) -> Iterator[tuple[str, int, nn.Parameter]]:
        """Every parameter of a submodule in which the members differ: its path, its member, and itself."""
        return own_parameters(self._apart)

    def floats(self) -> list[tuple[float, ...]]:
        """The float attributes in which the members differ, one tuple for each."""
        return [slot.numbers for slot in self._slots if slot.numbers is not None]

    @contextmanager
    def replaced(self, tensors: Mapping[int, Tensor]) -> Iterator[None]:
        """Within, other tensors stand for the stacked ones, by the `id` of these; for tracing."""
        slots = [slot for slot in self._slots if slot.registered and not slot.shared]
        before = [(slot, slot.data, slot.versions) for slot in slots]
        for slot, own, _ in before:
            slot.stand_in(tensors[id(own)])
        try:
            yield
        finally:
            for slot, own, versions in before:
                slot.stand_in(own, versions)

    def _each(self, fn: Callable[..., Any], keys: Callable[[], list[int]], batch: tuple[Any, ...]) -> Any:
        """The same by the members themselves, their parameters being rows of the stacked ones."""
        self.follow_own()
        slots = [slot for slot in self._slots if slot.registered and not slot.shared]
        columns = [rows(slot.data) for slot in slots]
        results = []
        others = OtherGenerators() if len(self) > 1 else None
        attributes = attributes_of(self.members[0]) if len(self) > 1 else {}
        for b, member in enumerate(self.members):
            if b and others is not None:
                others.restore()
            mine = pytree.tree_map_only(Tensor, partial(_own, b=b, alone=len(self) == 1), batch)
            for slot, row in zip(slots, columns, strict=True):
                slot.put(b + 1, row[b])
            try:
                home = partial(_home, slots, [row[b] for row in columns], b)
                with member_run(Randomness(partial(_key, keys, b), alone=True), home):
                    results.append(fn(member, *mine))
                for slot, row in zip(slots, columns, strict=True):
                    slot.keep_row(b, row[b])
            finally:
                for slot in slots:
                    slot.put(b + 1, slot.own[b])
        self._check_shared()
        if len(self) > 1 and any(v is not attributes.get(k) for k, v in attributes_of(self.members[0]).items()):
            self._single.add(_ALL)  # the members keep state that the stage does not have
        return join(results)

    def _save(self, all: bool) -> list[tuple[Tensor, Tensor]]:
        """What a run may change beside plain attributes, with copies.

        Args:
            all: also parameters that are frozen and kept once. They may be large, and few functions write to them; that
                they do nearly always shows the first time.
        """
        kept = [*self.buffers(), *(self.frozen.parameters() if all else ())]
        return [(tensor.detach(), tensor.detach().clone()) for tensor in kept]

    def _frozen_versions(self) -> list[int]:
        """Grow with what is written to parameters that are kept once."""
        return [parameter._version for parameter in self.frozen.parameters()]

    def _shared_slot(self, error: Exception) -> Slot | None:
        """The frozen parameter, kept once, that was to be changed for each member."""
        target = error.target if isinstance(error, SharedWriteError) else None
        return next((slot for slot in self._slots if slot.shared and slot.data is target), None)

    def _check_shared(self) -> None:
        for slot in self._slots:
            if slot.shared and slot.versions != slot.own_versions():
                raise FusionError(
                    f"{slot.path!r} is frozen and kept once for all members, and a member has changed it; register it "
                    "as a buffer, or give each member another value"
                )

    def _refuse_left(self) -> None:
        if self._left:
            raise FusionError("the members have left this array by `select` or `concat`; use the array that came of it")

    def follow(self) -> None:
        """Take over what has been changed in the members since the last run: frozen parameters, modes, numbers.

        Raises:
            FusionError: it was not changed alike in all members.
        """
        self._follow_slots()
        if self._plain.pull():
            self.version += 1

    def follow_own(self) -> None:
        """`follow` before members run as they are; a lone one needs nothing of what runs for all."""
        if len(self) > 1:
            self.follow()
        else:
            self._follow_slots()

    def _follow_slots(self) -> None:
        for slot in self._slots:
            if slot.follow():
                self.version += 1

    def catch_up(self) -> None:
        """`follow`, when all members have only run by themselves so far, and have set up what they set up when run."""
        self.follow()
        self._plain.catch_up()

    def check_batch(self, batch: Any) -> None:
        """Refuse batches that are stacked for another number of members.

        Raises:
            FusionError: names both numbers.
        """
        for leaf in pytree.tree_leaves(batch):
            if isinstance(leaf, Stacked) and len(leaf.whole) != len(self):
                raise FusionError(f"{len(leaf.whole)} batches are stacked for an array of {len(self)} members")

    @property
    def partial(self) -> bool:
        """Whether members differ in some submodules."""
        return bool(self._apart)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ModelArray":
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for slot in self._slots:
            slot.adopt()
        self._spare = None
        return self


_ALL = "every function"
_said: set[Any] = set()
"""Functions whose reason to run member by member was logged."""


def fuse(models: Iterable[nn.Module], seeds: Sequence[int] | None = None, strict: bool = True) -> ModelArray:
    """Make one array of models of equal structure; they may differ in values and in float attributes.

    Args:
        models: at least one, each an own object, all on one device, in one mode (training or evaluation). An iterator
            may make them one by one: of frozen parameters with equal values then only one copy is ever held.
        seeds: of the members' random numbers; by default drawn from torch's default generator.
        strict: refuse models that differ in structure; otherwise submodules in which they differ, and whose results
            agree in shape, run member by member, and the rest as one (partial fusion).

    Raises:
        FusionError: no models, the same model twice, or models that differ: names the member and the module path.
    """
    if isinstance(models, nn.Module):
        raise FusionError(f"`models` must be several torch.nn.Module, got one, a {type(models).__name__}")
    members: list[nn.Module] = []
    for model in models:
        if not isinstance(model, nn.Module):
            raise FusionError(f"`models` must be a list of torch.nn.Module, got {model!r} among them")
        members.append(model)
        if not isinstance(models, Sequence):
            lend_frozen(members[0], model)
    check_members(members)
    if seeds is None:
        seeds = torch.randint(0, 2**62, (len(members),)).tolist()
    if len(seeds) != len(members):
        raise FusionError(f"{len(members)} models need as many seeds, got {len(seeds)}")
    return ModelArray(members, seeds, strict)


def concat(arrays: Sequence[ModelArray]) -> ModelArray:
    """One array of the members of several, in order; the arrays themselves are to be dropped.

    Raises:
        FusionError: their structures differ, or they have run a different number of steps.
    """
    ticks = {array.tick for array in arrays}
    if len(ticks) > 1:
        raise FusionError(f"arrays that have been called {sorted(ticks)} times cannot be joined: random numbers differ")
    joined = fuse(
        [m for array in arrays for m in array.members],
        [s for array in arrays for s in array.seeds],
        strict=all(array.strict for array in arrays),
    )
    joined.tick = ticks.pop()
    for array in arrays:
        array._left = True
    return joined


def _call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return model(*args, **kwargs)


def _rebuild(members: Sequence[nn.Module], seeds: Sequence[int], strict: bool, tick: int) -> ModelArray:
    array = ModelArray(members, seeds, strict)
    array.tick = tick
    return array


def _code(fn: Any) -> Any:
    """What stays the same when a lambda or a bound method is made anew at every call."""
    if isinstance(fn, partial):
        return _code(fn.func)
    return getattr(getattr(fn, "__func__", fn), "__code__", fn)


def _home(slots: Sequence[Slot], rows: Sequence[Tensor], b: int, tensor: Tensor) -> tuple[Tensor, int] | None:
    """The stacked tensor of which member b's tensor is a row."""
    return next(((slot.data, b) for slot, row in zip(slots, rows, strict=True) if row is tensor), None)


def _key(keys: Callable[[], list[int]], b: int) -> list[int]:
    return keys()[b : b + 1]


def _own(value: Tensor, b: int, alone: bool) -> Tensor:
    """Member b's part of a batch: a slice, or what is shared, which it may change without the others' seeing it."""
    if isinstance(value, Stacked):
        return value.whole[b]
    return value if alone else value.clone()


def _shallow_copy(model: nn.Module) -> nn.Module:
    """The same modules with the same tensors, ready to have other tensors put in their places."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in tensors_within(model)})
