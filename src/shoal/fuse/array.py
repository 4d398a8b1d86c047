"""Models of one structure as one model with an axis B."""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.core.errors import FusionError
from shoal.fuse.bindings import copy_of
from shoal.fuse.checks import indices_of, modules_apart
from shoal.fuse.intercept import Home, MemberFunctions
from shoal.fuse.member_changes import AttributeSync, ModuleChangeDetector, attributes_of
from shoal.fuse.outputs import join, spread
from shoal.fuse.ownership import take_ownership
from shoal.fuse.per_member import check_shared, function_of, place_of, refuse_outer_grad, run_each, tensors_in
from shoal.fuse.randomness import Randomness, active, member_keys, randomness
from shoal.fuse.rows import forget
from shoal.fuse.slot_discovery import find_slots, tensors_within
from shoal.fuse.slots import Slot, keep, keep_rows
from shoal.fuse.stacked import NeedsMemberError, SharedWriteError, Stacked, events
from shoal.fuse.transaction import Transaction
from shoal.fuse.unfused_module import UnfusedModule, own_parameters, own_places, put_apart

__all__ = ["ModelArray"]

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
    _apart: list[UnfusedModule]
    _plain: AttributeSync
    _watch: ModuleChangeDetector

    def __init__(self, members: Sequence[nn.Module], seeds: Sequence[int], strict: bool = True) -> None:
        super().__init__()
        paths = modules_apart(members, strict)
        self.__dict__["members"] = tuple(members)  # not submodules: their tensors are views of this module's own
        self.seeds = tuple(seeds)
        self.strict = strict
        self.tick = 0
        """Number of the next call; members' random numbers depend on it and on their seeds alone."""
        self._ahead = (0,) * len(members)
        self.version = 0
        """Grows when parameters are frozen or unfrozen; a captured step of before is then out of date."""
        self._single: set[Any] = set()
        """Functions that run member by member."""
        self._ran: set[Any] = set()
        """Functions that have run for all members at once."""
        self._left = False
        self.stacked, self.frozen = nn.Module(), nn.Module()
        stage = copy_of(members[0], tensors_within(members[0]))
        self.__dict__["_apart"] = put_apart(stage, members, paths)
        own = zip(*(part.own for part in self._apart), strict=True)  # of each member
        self.separate = nn.ModuleList(map(nn.ModuleList, own))
        self.__dict__["_stage"] = stage
        self.__dict__["_slots"] = find_slots(stage, members, paths)
        for slot in self._slots:
            slot.settle(self.stacked, self.frozen)
        self.__dict__["_plain"] = AttributeSync(
            stage, members, [place for slot in self._slots for places in slot.places for place in places]
        )
        self.__dict__["_watch"] = ModuleChangeDetector(stage, members, self._slots, paths)
        self.training = members[0].training
        for left in take_ownership(self, members):
            left._left = True

    def __len__(self) -> int:
        return len(self.members)

    def __reduce__(self) -> Any:
        if active() is not None:
            raise FusionError("an array is pickled or copied within a function that an array runs; do so after the run")
        return _rebuild, (self.members, self.seeds, self.strict, self.ticks)

    @property
    def ticks(self) -> tuple[int, ...]:
        """`tick` of each member; they differ in members that were not always in one array."""
        return tuple(self.tick + ahead for ahead in self._ahead)

    @ticks.setter
    def ticks(self, ticks: Sequence[int]) -> None:
        self.tick, self._ahead = ticks[0], tuple(tick - ticks[0] for tick in ticks)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Every member's output, stacked: [B, N, ...] where a member gives [N, ...]. Plain inputs are shared."""
        return self.map(_call, args, kwargs)

    def map(self, fn: Callable[..., Any], *batch: Any) -> Any:
        """Like `[fn(member, *batch) for member in members]`, at once.

        Where its first call shows that this cannot be, what `fn` has done to parameters, gradients, buffers,
        attributes, and to lists, dicts and variables that it names is taken back, and it runs member by
        member. So it does where it returns an object or leaves a tensor in such a list, dict or variable, which then
        get each member's own.

        Args:
            fn: takes a model and a batch and returns tensors, nested as it likes. It sees one member's shapes. It may
                go backward; optimizers that were made outside of it are to step outside of it.
            batch: shared by all members, or `Stacked`.

        Returns:
            What `fn` returns, each tensor or number as a tensor with a leading axis B. Anything else in it but None (a
            string, a numpy array, an object that `torch.utils._pytree` does not know) becomes a list of the members'.

        Raises:
            FusionError: it is called within a function that this array or another one runs, or `fn` asks for the
                gradients of parameters from outside of the model that it is given, as an optimizer does; or it is no
                function; or a later call than its first shows that it must run member by member.
        """
        if not callable(fn):
            raise FusionError(f"`fn` must be a function of a model and a batch, got {fn!r}")
        self.check_free()
        self.check_batch(batch)
        keys = self.next_keys()
        key = (function_of(fn), self.training)
        if len(self) == 1 or key in self._single or _ALL in self._single:
            return self._each(fn, keys, batch)
        if key not in self._ran:
            return self._first(fn, key, keys, batch)
        try:
            return self._at_once(fn, keys, batch)
        except NeedsMemberError as error:
            self._single.add(key)
            raise FusionError(
                f"{place_of(error, fn)}: {error}, in a later call than the first, and what this one has done is not "
                "taken back; go back to what was saved before it (from now on the function runs member by member)"
            ) from error

    def _first(self, fn: Callable[..., Any], key: Any, keys: Callable[[], list[int]], batch: tuple[Any, ...]) -> Any:
        """The first run of a function: of all members at once, or, where that cannot be and is taken back, of each."""
        transaction = self._transaction(fn)
        while True:
            alike = [slot for slot in self._slots if slot.alike]
            try:
                result = self._at_once(fn, keys, batch, transaction)
            except NeedsMemberError as error:
                reason = f"{place_of(error, fn)}: {error}"
                written = self._shared_slot(error)
            else:
                self._ran.add(key)
                return result
            transaction.restore()
            if written is not None:
                written.part(self.stacked)
                self.version += 1
                transaction = self._transaction(fn)
            elif alike:
                for slot in alike:  # it may be that one of them is to be changed for each member
                    slot.alike = False
            else:
                break
        self._single.add(key)
        if key not in _said:
            _said.add(key)
            _log.warning("it runs member by member: %s", reason)
        return self._each(fn, keys, batch)

    def _at_once(
        self,
        fn: Callable[..., Any],
        keys: Callable[[], list[int]],
        batch: tuple[Any, ...],
        transaction: Transaction | None = None,
    ) -> Any:
        """What `map` returns, of a run of all members as one.

        Raises:
            NeedsMemberError: that cannot be.
        """
        bypassed = events.bypasses
        try:
            with self.open(keys, partial(refuse_outer_grad, self._slots)) as model:
                result = fn(model, *batch)
                with torch._C.DisableTorchFunction():
                    result = pytree.tree_map(lambda value: spread(value, len(self)), result)
                if transaction is not None and (left := transaction.left_of_members()) is not None:
                    raise NeedsMemberError(left)
            return result
        except RuntimeError as error:
            if events.bypasses == bypassed:
                raise
            raise NeedsMemberError(str(error)) from error

    def _transaction(self, fn: Callable[..., Any]) -> Transaction:
        """All that running a function at once may change."""
        self.follow()
        own = [*(slot.data for slot in self._slots if slot.own), *own_places(self._apart)]
        places = {(id(held), key) for slot in self._slots for held, key in slot.places[0]}
        return Transaction([self._stage], [fn], tensors=own, places=places)

    def take_over(self, b: int) -> None:
        """Copy what member b, which ran as it is, has put in the place of its tensors; these stand there again then.

        Raises:
            FusionError: it has put another tensor in the place of a parameter, one of another shape in that of a
                buffer, or has changed a frozen parameter that is kept once for all members.
        """
        slots = self._own_slots()
        keep_rows(slots, b, [slot.own[b] for slot in slots], self.members[b])
        check_shared(self._slots)

    def check_places(self) -> None:
        """Refuse members whose parameters or buffers are no rows of the array's any more.

        Raises:
            FusionError: names the member and the tensor.
        """
        for b in range(len(self)):
            self._watch.tensors(b)

    def put_back(self, b: int) -> None:
        """Member b has its own tensors again, after a function that it ran has failed."""
        for slot in self._own_slots():
            slot.put(b + 1, slot.own[b])

    def _own_slots(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.registered and not slot.shared]

    @contextmanager
    def open(
        self, keys: Tensor | Callable[[], list[int]] | None = None, home: Home | None = None
    ) -> Iterator[nn.Module]:
        """The members as one model of the user's own class, whose tensors are `Stacked`.

        Args:
            keys: of the random numbers drawn within, int64 [B], or what makes them; by default those of the next call.
            home: see `MemberFunctions`.
        """
        if keys is None:
            keys = self.next_keys()
        self.follow()
        self._watch.modules(self.tick % len(self))
        forget(self.stacked.parameters())
        for slot in self._slots:
            slot.show()
        source = Randomness(keys)
        try:
            with randomness(source), MemberFunctions(len(self), source, home):
                yield self._stage
            added, removed = self._watch.take_back()
            if removed:
                raise FusionError(
                    f"a function deletes {sorted(removed)} of the model; do so before the models are fused"
                )
            if added:
                self._single.add(_ALL)  # the members then have what the stage does not have
                raise NeedsMemberError(f"it registers {sorted(added)}")
            keep(self._slots, self._stage)
            self.version += sum([slot.freeze_members() for slot in self._slots])
        except BaseException:
            self._watch.take_back()
            for slot in self._slots:
                slot.keep_alike()
            raise
        self._plain.push()

    def unfuse(self) -> list[nn.Module]:
        """The members themselves: their own classes, with their current weights and buffers.

        Nothing is copied. Their tensors still are views of the array's, and a frozen parameter that is kept once is
        one memory for all: `copy.deepcopy` a member to have it by itself, or before it is saved or unfrozen alone.
        """
        return list(self.members)

    def select(self, indices: Iterable[int] | Tensor) -> "ModelArray":
        """A new array of some members, in the order given. All members leave this one, which is of no use any more.

        Args:
            indices: of members, negative ones from the end; or B truth values.

        Raises:
            FusionError: no indices, one that is no member's, or one given twice; or the members have left already.
        """
        self.check_present()
        chosen = indices_of(indices, len(self))
        array = ModelArray([self.members[i] for i in chosen], [self.seeds[i] for i in chosen], self.strict)
        array.ticks = [self.ticks[i] for i in chosen]
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

    def tensors(self) -> list[Tensor]:
        """Every stacked parameter and buffer, and those that members have by themselves."""
        return [*(stacked for _, stacked, _ in self.columns()), *own_places(self._apart)]

    @contextmanager
    def replaced(self, tensors: Mapping[int, Tensor]) -> Iterator[None]:
        """Within, other tensors stand for those of `tensors()`, by the `id` of these; for tracing.

        Raises:
            FusionError: what runs within puts another tensor in the place of one that a member has by itself.
        """
        before = [(slot, slot.data, slot.versions) for slot in self._slots if slot.registered and not slot.shared]
        places = own_places(self._apart)
        for slot, own, _ in before:
            slot.stand_in(tensors[id(own)])
        for own, where in places.items():
            for held, name in where:
                held[name] = tensors[id(own)]
        try:
            yield
            if put := [n for own, where in places.items() for held, n in where if held[n] is not tensors[id(own)]]:
                raise FusionError(f"another tensor is put in the place of {put[0]!r}, in a submodule that differs")
        finally:
            for slot, own, versions in before:
                slot.stand_in(own, versions)
            for own, where in places.items():
                for held, name in where:
                    held[name] = own

    def next_keys(self) -> Callable[[], list[int]]:
        """What makes the keys of the members' random numbers in the next call, which is counted."""
        self.tick += 1
        return partial(_keys, self.seeds, self.tick - 1, self._ahead)

    def _each(self, fn: Callable[..., Any], keys: Callable[[], list[int]], batch: tuple[Any, ...]) -> Any:
        """The same by the members themselves, their parameters being rows of the stacked ones."""
        self.follow_own()
        attributes = attributes_of(self.members[0]) if len(self) > 1 else {}
        results = run_each(self.members, self._slots, fn, keys, batch)
        if len(self) > 1 and any(v is not attributes.get(k) for k, v in attributes_of(self.members[0]).items()):
            self._single.add(_ALL)  # the members keep state that the stage does not have
        return join(results)

    def _shared_slot(self, error: BaseException) -> Slot | None:
        """The frozen parameter, kept once, that was to be changed for each member."""
        target = error.target if isinstance(error, SharedWriteError) else None
        return next((slot for slot in self._slots if slot.shared and slot.data is target), None)

    def check_free(self) -> None:
        """Refuse to run within a function that an array runs, or when the members have left.

        Raises:
            FusionError: it is so.
        """
        if active() is not None:
            raise FusionError(
                "an array is called within a function that an array runs; call it before that, and hand over what it "
                "returns as a batch of each member's own: `shoal.stack(result)`"
            )
        self.check_present()

    def check_present(self) -> None:
        """Refuse to go on with an array, or its optimizer, whose members are in another one.

        Raises:
            FusionError: they are.
        """
        if self._left:
            raise FusionError(
                "the members have left this array by `select`, `concat` or another `fuse`; use the array that came of "
                "it, and the optimizer that `fuse_optimizers` makes for that array of its members' own"
            )

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
        self._watch.tensors(self.tick % len(self))

    def catch_up(self) -> None:
        """`follow`, when all members have only run by themselves so far, and have set up what they set up when run."""
        self.follow()
        self._plain.catch_up()

    def check_batch(self, batch: Any) -> None:
        """Refuse batches that are stacked for another number of members.

        Raises:
            FusionError: names both numbers.
        """
        for leaf in tensors_in(batch):
            if isinstance(leaf, Stacked) and len(leaf.whole) != len(self):
                raise FusionError(f"{len(leaf.whole)} batches are stacked for an array of {len(self)} members")

    @property
    def partial(self) -> bool:
        """Whether members differ in some submodules."""
        return bool(self._apart)

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy what `state_dict` gave into the array, and so into its members.

        Raises:
            FusionError: `assign` is set, which would part the array from its members.
        """
        if assign:
            raise FusionError(
                "an array cannot take over a state_dict's tensors (assign=True): its members' are views of its own; "
                "load with assign=False, which copies, after moving the array (`to`) to the wanted type and device"
            )
        return super().load_state_dict(state_dict, strict)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ModelArray":
        if any(fn(one[:0] if one.dim() else one).is_meta and not one.is_meta for one in self.stacked.parameters()):
            raise FusionError("an array cannot be moved to 'meta', where its members would lose their values")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for slot in self._slots:
            slot.adopt()
        return self


_ALL = "every function"
_said: set[Any] = set()
"""Functions whose reason to run member by member was logged."""


def _keys(seeds: Sequence[int], tick: int, ahead: Sequence[int]) -> list[int]:
    return member_keys(seeds, [tick + more for more in ahead])


def _call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return model(*args, **kwargs)


def _rebuild(members: Sequence[nn.Module], seeds: Sequence[int], strict: bool, ticks: tuple[int, ...]) -> ModelArray:
    array = ModelArray(members, seeds, strict)
    array.ticks = ticks
    return array
