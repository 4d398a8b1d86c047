"""The state of an array: its members, their stacked tensors, and the template, the one model that runs for all members.

The template is a copy of the first member whose tensors are replaced by `Stacked` tensors. Before a run, changes that
user code made in the members are copied to the template. After a run, its changes are copied to the members.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from functools import partial
from operator import attrgetter
from typing import Any

from torch import Tensor, nn

from shoal.core.errors import FusionError
from shoal.fuse.checks import check_structure
from shoal.fuse.container_sync import MODULE_ATTRIBUTES
from shoal.fuse.guard import guard
from shoal.fuse.intercept import FunctionInterceptor, GradientCheck
from shoal.fuse.member_changes import AttributeSync, ModuleChangeDetector
from shoal.fuse.model_copy import copy_model
from shoal.fuse.quantised import call_once, prepare_quantised, state_names
from shoal.fuse.randomness import RandomSource, member_keys, use_source
from shoal.fuse.rows import storage_address
from shoal.fuse.slots import Slot, find_slots, tensors_within
from shoal.fuse.stacked import NeedsMemberError, Stacked
from shoal.fuse.unfused_module import insert_unfused_modules, unfused_tensor_places

__all__ = ["ArrayState"]

_REQUIRES_GRAD = attrgetter("requires_grad")
_STACKED_PLACE = attrgetter("stacked_place")


class ArrayState:
    """Keeps the members of an array, their stacked tensors and the template synchronised."""

    def __init__(
        self, members: Sequence[nn.Module], seeds: Sequence[int], strict: bool, stacked: nn.Module, frozen: nn.Module
    ) -> None:
        for member in members:
            prepare_quantised(member)
        paths, attributes = check_structure(members, strict)
        self._stacked = stacked
        self.members = tuple(members)
        self.seeds = tuple(seeds)
        self.tick = 0
        """Number of the next call; members' random numbers depend on it and on their seeds alone."""
        self._tick_offsets = (0,) * len(members)
        self.version = 0
        """Incremented when parameters are frozen or unfrozen; steps captured at an earlier version are out of date."""
        self._running = False
        self.template = copy_model(members[0], tensors_within(members[0]))
        for (path, name), differing in attributes.items():
            guard(vars(self.template.get_submodule(path)), name, differing, f"{path}.{name}".lstrip("."))
        self.unfused = insert_unfused_modules(self.template, members, paths)
        self.slots = find_slots(self.template, members, paths)
        for slot in self.slots:
            slot.stack_members(stacked, frozen)
        self.prepare_quantised()
        self._floating = [slot for slot in self.slots if slot.floats is not None]
        self._trainable = [slot for slot in self.slots if slot.trainable]
        self._first_tensors = [slot.member_tensors[0] for slot in self._trainable]
        places = [place for slot in self.slots for of_one in slot.places for place in of_one]
        modules = [module for model in (self.template, *members) for module in model.modules()]
        places += [(vars(module), name) for module in modules for name in state_names(module)]
        self._attributes = AttributeSync(self.template, members, places)
        self._changes = ModuleChangeDetector(self.template, members, self.slots, paths)

    def prepare_quantised(self) -> None:
        """Let quantised layers refer to the scales of the weights that they have now, which members share."""
        for slot in self.slots:
            slot.install()
        for model in (*self.members, self.template):
            prepare_quantised(model)
        call_once(self.template)

    @property
    def ticks(self) -> tuple[int, ...]:
        """`tick` of each member; they differ in members that were not always in one array."""
        return tuple(self.tick + ahead for ahead in self._tick_offsets)

    @ticks.setter
    def ticks(self, ticks: Sequence[int]) -> None:
        self.tick, self._tick_offsets = ticks[0], tuple(tick - ticks[0] for tick in ticks)

    def next_keys(self) -> Callable[[], list[int]]:
        """Count a call, and return the function that makes the keys of the members' random numbers in this call."""
        self.tick += 1
        return partial(_keys, self.seeds, self.tick - 1, self._tick_offsets)

    @contextmanager
    def open(
        self, keys: Tensor | Callable[[], list[int]] | None = None, check_gradient: GradientCheck | None = None
    ) -> Iterator[nn.Module]:
        """Context manager that yields the template, a model of the user's own class whose tensors are `Stacked`.

        Args:
            keys: Keys of the random numbers drawn in the context, int64 [B], or a function that makes them; by default
                those of the next call.
            check_gradient: See `FunctionInterceptor`.
        """
        if keys is None:
            keys = self.next_keys()
        self.sync_from_members()
        self._changes.check_modules(self.tick % len(self.members))
        for slot in self.slots:
            slot.install()
        with self._run(check_gradient, RandomSource(keys)):
            yield self.template

    @contextmanager
    def _run(self, check_gradient: GradientCheck | None, source: RandomSource) -> Iterator[None]:
        """Context manager of a run, or of a checkpointed part that runs again, maybe within the run."""
        source.open_run = partial(self._run, check_gradient)
        within, self._running = self._running, True
        try:
            with use_source(source), FunctionInterceptor(len(self.members), source, check_gradient):
                yield
            if within:
                return
            if names := self._changes.registrations():
                raise NeedsMemberError(f"it registers or deletes {names} of the model")
            _commit(self.slots, self.template)
            self.version += sum([slot.push_requires_grad() for slot in self.slots])
        except BaseException:
            for slot in self.slots:
                slot.propagate_write()
            raise
        finally:
            self._running = within
        self._attributes.push()

    def sync_train_modes(self) -> None:
        """Take over the modes of the members' modules, which are those of the first one."""
        self._attributes.pull_train_modes()

    def sync_to_members(self) -> None:
        """Copy all changes that runs have made in attributes of the template to the members, before these are used."""
        self._attributes.push(search=True)

    def sync_from_members(self, search: bool = False) -> None:
        """Copy changes of the members since the last run to the template: `requires_grad`, modes, plain attributes.

        Args:
            search: Whether to look also for containers that runs of members have changed for the first time.
        """
        self.sync_slots()
        if self._attributes.pull(search):
            self.version += 1

    def sync_before_member_runs(self) -> None:
        """Synchronise before a run member by member; with a single member, the template's attributes are not needed."""
        if len(self.members) > 1:
            self.sync_from_members()
        else:
            self.sync_slots()

    def sync_slots(self) -> None:
        """Copy changes of `requires_grad` and of floats to the slots, and check the tensors of the next member."""
        stacked = [container[key] for container, key in map(_STACKED_PLACE, self._trainable)]
        same = list(map(_REQUIRES_GRAD, stacked)) == list(map(_REQUIRES_GRAD, self._first_tensors))
        for slot in self._floating if same else self.slots:
            if slot.sync_from_members():
                self.version += 1
        self._changes.check_tensors(self.tick % len(self.members))

    def check_all_members(self) -> None:
        """Refuse members whose parameters or buffers are no longer rows of the array's tensors."""
        for b in range(len(self.members)):
            self._changes.check_tensors(b)

    def commit_member(self, b: int) -> None:
        """Copy tensors by which member b replaced its own during a run into the array; then restore its own."""
        found = [(slot, slot.value_at(b + 1)) for slot in self.stacked_slots()]
        _check_no_parameters((slot, value) for slot, value in found if value is not slot.member_tensors[b])
        changed = [
            (slot, value)
            for slot, value in found
            if value is not slot.member_tensors[b] or value.data_ptr() != slot.addresses[b]
        ]
        for slot, value in _without_overlap(changed, self.members[b]):
            slot.update_member(b, value)
        _check_shared(self.slots)

    def restore_member(self, b: int) -> None:
        """Restore the tensors of member b after its run has failed."""
        for slot in self.stacked_slots():
            slot.assign(b + 1, slot.member_tensors[b])

    def unshare(self, slot: Slot) -> None:
        """Give each member its own copy of a frozen parameter that was stored once."""
        slot.unshare(self._stacked)
        self.version += 1

    def stacked_slots(self) -> list[Slot]:
        """Slots of parameters and buffers of which each member has its own."""
        return [slot for slot in self.slots if slot.registered and not slot.shared]

    def floats(self) -> list[tuple[float, ...]]:
        """The float attributes in which the members differ: for each attribute, the members' values."""
        return [slot.floats for slot in self._floating if slot.floats is not None]

    def tensors(self) -> list[Tensor]:
        """Every stacked parameter and buffer, and those of submodules in which the members differ."""
        return [*(slot.data for slot in self.stacked_slots()), *unfused_tensor_places(self.unfused)]

    @contextmanager
    def substituted(self, tensors: Mapping[int, Tensor]) -> Iterator[None]:
        """Context manager that replaces the tensors of `tensors()` by other tensors, for tracing."""
        before = [(slot, slot.data, slot.versions) for slot in self.stacked_slots()]
        places = unfused_tensor_places(self.unfused)
        for slot, own, _ in before:
            slot.substitute(tensors[id(own)])
        for own, where in places.items():
            for held, name in where:
                held[name] = tensors[id(own)]
        try:
            yield
            if put := [n for own, where in places.items() for held, n in where if held[n] is not tensors[id(own)]]:
                raise FusionError(f"another tensor is put in the place of {put[0]!r}, in a submodule that differs")
        finally:
            for slot, own, versions in before:
                slot.substitute(own, versions)
            for own, where in places.items():
                for held, name in where:
                    held[name] = own


def _keys(seeds: Sequence[int], tick: int, ahead: Sequence[int]) -> list[int]:
    return member_keys(seeds, [tick + more for more in ahead])


def _check_shared(slots: Sequence[Slot]) -> None:
    """Refuse a change of a frozen parameter that is stored once for all members."""
    for slot in slots:
        if slot.shared and slot.versions != slot.own_versions():
            raise FusionError(
                f"{slot.path!r} is frozen and kept once for all members, and a member has changed it; register it "
                "as a buffer, or give each member another value"
            )


def _commit(slots: Sequence[Slot], template: nn.Module) -> None:
    """Copy values that user code has assigned in the template, and writes to uniform buffers, to all members."""
    replaced = [(slot, value) for slot in slots if (value := slot.value_at(0)) is not slot.template_value]
    _check_no_parameters(replaced)
    for slot, value in _without_overlap(replaced, template):
        slot.update_from(value)
    for slot in slots:
        slot.propagate_write()
        if slot.shared:
            slot.versions = slot.own_versions()


def _check_no_parameters(replaced: Iterable[tuple[Slot, Any]]) -> None:
    for slot, value in replaced:
        if slot.trainable and isinstance(value, Tensor):
            raise FusionError(
                f"{slot.path!r} is a parameter, and a function has put another tensor in its place; change it in place "
                "(under torch.no_grad()), or register what changes as a buffer"
            )


def _without_overlap(replaced: Sequence[tuple[Slot, Any]], model: nn.Module) -> Sequence[tuple[Slot, Any]]:
    """Copy new values that lie in memory which the commit overwrites, as when two buffers are swapped.

    Tensors in other attributes of the model, and in lists and dicts there, keep their old values as well.
    """
    written = {storage_address(slot.data) for slot, _ in replaced if slot.registered and not slot.shared}
    if not written:
        return replaced
    for attributes in map(vars, model.modules()):
        own = {name: attributes[name] for name in attributes.keys() - MODULE_ATTRIBUTES}
        _copy_overlapping(written, attributes, own.items())
        for held in own.values():
            if isinstance(held, (list, deque, dict)):
                _copy_overlapping(written, held, held.items() if isinstance(held, dict) else enumerate(held))
    return [(slot, _copied_if_written(written, value)) for slot, value in replaced]


def _copy_overlapping(written: Set[int], container: Any, items: Iterable[tuple[Any, Any]]) -> None:
    """Replace a container's tensors that lie in the memory to be written by copies."""
    for key, value in list(items):
        copied = _copied_if_written(written, value)
        if copied is not value:
            container[key] = copied


def _copied_if_written(written: Set[int], value: Any) -> Any:
    if isinstance(value, Stacked):
        return Stacked(value.whole.detach().clone()) if storage_address(value.whole) in written else value
    return value.detach().clone() if isinstance(value, Tensor) and storage_address(value) in written else value
