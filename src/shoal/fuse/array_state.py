"""The state of an array: its members, their tensors and attributes, and the stage, the model that runs for all.

What user code changes in the members is taken over into the stage before a run, and what a run changes in the stage is
taken over into the members after it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from shoal.core.errors import FusionError
from shoal.fuse.bindings import copy_of
from shoal.fuse.checks import check_structure
from shoal.fuse.guard import guard
from shoal.fuse.intercept import Home, MemberFunctions
from shoal.fuse.member_changes import OF_EVERY_MODULE, AttributeSync, ModuleChangeDetector
from shoal.fuse.randomness import Randomness, member_keys, randomness
from shoal.fuse.rows import forget, memory_of
from shoal.fuse.slots import Slot, find_slots, tensors_within
from shoal.fuse.stacked import NeedsMemberError, Stacked
from shoal.fuse.unfused_module import own_places, put_apart

__all__ = ["EVERY_FUNCTION", "ArrayState", "check_shared", "keep_rows"]

EVERY_FUNCTION = "every function"
"""Entry of `ArrayState.by_member` that stands for all functions."""


class ArrayState:
    """Keeps the members of an array, their stacked tensors and the stage in step.

    Args:
        members: Models that `check_members` accepts.
        seeds: Seeds of the members' random numbers, one each.
        strict: Whether to refuse members that differ in a submodule.
        stacked: Module that gets the stacked parameters and buffers.
        frozen: Module that gets the frozen parameters that are kept once for all members.

    Raises:
        FusionError: The members differ in structure, or cannot be copied.
    """

    def __init__(
        self, members: Sequence[nn.Module], seeds: Sequence[int], strict: bool, stacked: nn.Module, frozen: nn.Module
    ) -> None:
        paths, attributes = check_structure(members, strict)
        self._stacked = stacked
        self.members = tuple(members)
        self.seeds = tuple(seeds)
        self.tick = 0
        """Number of the next call; members' random numbers depend on it and on their seeds alone."""
        self._ahead = (0,) * len(members)
        self.version = 0
        """Grows when parameters are frozen or unfrozen; a captured step of before is then out of date."""
        self.by_member: set[Any] = set()
        """Functions that run member by member."""
        self.stage = copy_of(members[0], tensors_within(members[0]))
        for (path, name), differing in attributes.items():
            guard(vars(self.stage.get_submodule(path)), name, differing, f"{path}.{name}".lstrip("."))
        self.apart = put_apart(self.stage, members, paths)
        """Submodules in which the members differ."""
        self.slots = find_slots(self.stage, members, paths)
        for slot in self.slots:
            slot.settle(stacked, frozen)
        self._attributes = AttributeSync(
            self.stage, members, [place for slot in self.slots for places in slot.places for place in places]
        )
        self._changes = ModuleChangeDetector(self.stage, members, self.slots, paths)

    @property
    def ticks(self) -> tuple[int, ...]:
        """`tick` of each member; they differ in members that were not always in one array."""
        return tuple(self.tick + ahead for ahead in self._ahead)

    @ticks.setter
    def ticks(self, ticks: Sequence[int]) -> None:
        self.tick, self._ahead = ticks[0], tuple(tick - ticks[0] for tick in ticks)

    def next_keys(self) -> Callable[[], list[int]]:
        """Count a call, and return the function that makes the keys of the members' random numbers in it."""
        self.tick += 1
        return partial(_keys, self.seeds, self.tick - 1, self._ahead)

    @contextmanager
    def open(
        self, keys: Tensor | Callable[[], list[int]] | None = None, home: Home | None = None
    ) -> Iterator[nn.Module]:
        """Within, the stage stands for the members: a model of the user's own class whose tensors are `Stacked`.

        Args:
            keys: Keys of the random numbers drawn within, int64 [B], or a function that makes them; by default those
                of the next call.
            home: See `MemberFunctions`.

        Raises:
            FusionError: The members have changed in a way that cannot be taken over, or the code within deletes a
                part of the model.
            NeedsMemberError: The code within registers a module, parameter or buffer.
        """
        if keys is None:
            keys = self.next_keys()
        self.follow()
        self._changes.modules(self.tick % len(self.members))
        forget(self._stacked.parameters())
        for slot in self.slots:
            slot.show()
        source = Randomness(keys)
        try:
            with randomness(source), MemberFunctions(len(self.members), source, home):
                yield self.stage
            added, removed = self._changes.take_back()
            if removed:
                raise FusionError(
                    f"a function deletes {sorted(removed)} of the model; do so before the models are fused"
                )
            if added:
                self.by_member.add(EVERY_FUNCTION)  # each member gets the added parts, and the stage does not
                raise NeedsMemberError(f"it registers {sorted(added)}")
            _keep(self.slots, self.stage)
            self.version += sum([slot.freeze_members() for slot in self.slots])
        except BaseException:
            self._changes.take_back()
            for slot in self.slots:
                slot.keep_alike()
            raise
        self._attributes.push()

    def follow(self) -> None:
        """Take over changes in the members since the last run: frozen parameters, modes, numbers.

        Raises:
            FusionError: A change is not alike in all members.
        """
        self.follow_slots()
        if self._attributes.pull():
            self.version += 1

    def follow_own(self) -> None:
        """As `follow`, before members run by themselves; a lone member does not need the stage's attributes."""
        if len(self.members) > 1:
            self.follow()
        else:
            self.follow_slots()

    def follow_slots(self) -> None:
        """Take over changes of `requires_grad` and of float attributes, and check the tensors of one member by turns.

        Raises:
            FusionError: A change is not alike in all members, or a tensor was replaced.
        """
        for slot in self.slots:
            if slot.follow():
                self.version += 1
        self._changes.tensors(self.tick % len(self.members))

    def catch_up(self) -> None:
        """As `follow`, where all members have run only by themselves and their first run has set up attributes."""
        self.follow()
        self._attributes.catch_up()

    def check_places(self) -> None:
        """Refuse members whose parameters or buffers are no longer rows of the array's.

        Raises:
            FusionError: Names the member and the tensor.
        """
        for b in range(len(self.members)):
            self._changes.tensors(b)

    def take_over(self, b: int) -> None:
        """Copy the tensors that member b has put in the places of its own during a run; then restore these places.

        Raises:
            FusionError: The member has replaced a parameter, has replaced a buffer by a tensor of another shape, or
                has changed a frozen parameter that is kept once for all members.
        """
        slots = self.own_slots()
        keep_rows(slots, b, [slot.own[b] for slot in slots], self.members[b])
        check_shared(self.slots)

    def put_back(self, b: int) -> None:
        """Restore the tensors of member b after a run of it has failed."""
        for slot in self.own_slots():
            slot.put(b + 1, slot.own[b])

    def part(self, slot: Slot) -> None:
        """Give each member its own copy of a frozen parameter that was kept once."""
        slot.part(self._stacked)
        self.version += 1

    def own_slots(self) -> list[Slot]:
        """Slots of parameters and buffers of which each member has its own."""
        return [slot for slot in self.slots if slot.registered and not slot.shared]

    def floats(self) -> list[tuple[float, ...]]:
        """The float attributes in which the members differ, one tuple for each."""
        return [slot.numbers for slot in self.slots if slot.numbers is not None]

    def tensors(self) -> list[Tensor]:
        """Every stacked parameter and buffer, and those that members have by themselves."""
        return [*(slot.data for slot in self.own_slots()), *own_places(self.apart)]

    @contextmanager
    def replaced(self, tensors: Mapping[int, Tensor]) -> Iterator[None]:
        """Within, other tensors stand in the places of those of `tensors()`; for tracing.

        Args:
            tensors: Replacements by the `id` of the replaced tensor.

        Raises:
            FusionError: The code within puts another tensor in the place of one that a member has by itself.
        """
        before = [(slot, slot.data, slot.versions) for slot in self.own_slots()]
        places = own_places(self.apart)
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


def _keys(seeds: Sequence[int], tick: int, ahead: Sequence[int]) -> list[int]:
    return member_keys(seeds, [tick + more for more in ahead])


def check_shared(slots: Sequence[Slot]) -> None:
    """Refuse a change of a frozen parameter that is kept once for all members.

    Raises:
        FusionError: Names the parameter.
    """
    for slot in slots:
        if slot.shared and slot.versions != slot.own_versions():
            raise FusionError(
                f"{slot.path!r} is frozen and kept once for all members, and a member has changed it; register it "
                "as a buffer, or give each member another value"
            )


def _keep(slots: Sequence[Slot], stage: nn.Module) -> None:
    """Take over values that user code has put in the stage's places, and writes to values that are shown once.

    Raises:
        FusionError: A parameter is replaced, or a buffer is replaced by a tensor of another shape.
    """
    replaced = [(slot, value) for slot in slots if (value := slot.found(0)) is not slot.shown]
    _check_no_parameters(replaced)
    for slot, value in _in_memory_of_their_own(replaced, stage):
        slot.take(value)
    for slot in slots:
        slot.keep_alike()
        if slot.shared:
            slot.versions = slot.own_versions()


def keep_rows(slots: Sequence[Slot], b: int, rows: Sequence[Tensor], member: nn.Module) -> None:
    """Take over values that user code has put in the places of member b.

    Args:
        slots: Slots of the array.
        b: Number of the member.
        rows: Tensors that stood in the places before: rows of the stacked tensors, or the member's own.
        member: The member.

    Raises:
        FusionError: As `_keep`.
    """
    found = [(slot, slot.found(b + 1), row) for slot, row in zip(slots, rows, strict=True)]
    _check_no_parameters((slot, value) for slot, value, row in found if value is not row)
    changed = [(slot, value) for slot, value, row in found if value is not row or value.data_ptr() != slot.addresses[b]]
    for slot, value in _in_memory_of_their_own(changed, member):
        slot.take_row(b, value)


def _check_no_parameters(replaced: Iterable[tuple[Slot, Any]]) -> None:
    for slot, value in replaced:
        if slot.trainable and isinstance(value, Tensor):
            raise FusionError(
                f"{slot.path!r} is a parameter, and a function has put another tensor in its place; change it in place "
                "(under torch.no_grad()), or register what changes as a buffer"
            )


def _in_memory_of_their_own(replaced: Sequence[tuple[Slot, Any]], model: nn.Module) -> Sequence[tuple[Slot, Any]]:
    """Copy new values of slots that lie in memory which is about to be overwritten, as where two buffers swap places.

    The same holds for old values of slots that the model keeps elsewhere: in attributes, or in lists, deques and dicts
    there.
    """
    written = {memory_of(slot.data) for slot, _ in replaced if slot.registered and not slot.shared}
    if not written:
        return replaced
    for attributes in map(vars, model.modules()):
        own = {name: attributes[name] for name in attributes.keys() - OF_EVERY_MODULE}
        _copy_from(written, attributes, own.items())
        for held in own.values():
            if isinstance(held, (list, deque, dict)):
                _copy_from(written, held, held.items() if isinstance(held, dict) else enumerate(held))
    return [(slot, _apart_from(written, value)) for slot, value in replaced]


def _copy_from(written: Set[int], container: Any, items: Iterable[tuple[Any, Any]]) -> None:
    """Replace a container's tensors that lie in the written memory by copies."""
    for key, value in list(items):
        copied = _apart_from(written, value)
        if copied is not value:
            container[key] = copied


def _apart_from(written: Set[int], value: Any) -> Any:
    if isinstance(value, Stacked):
        return Stacked(value.whole.detach().clone()) if memory_of(value.whole) in written else value
    return value.detach().clone() if isinstance(value, Tensor) and memory_of(value) in written else value
