"""Changes of members after fusion: plain attributes are followed, other changes of modules are refused."""

from collections.abc import Iterable, Iterator, Sequence
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import FusionError
from shoal.fuse.slots import Slot
from shoal.fuse.stacked import Stacked
from shoal.fuse.unfused_module import UnfusedModule

__all__ = ["OF_EVERY_MODULE", "AttributeSync", "ModuleChangeDetector", "attributes_of"]

OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
"""Attributes of every `nn.Module`, which torch manages itself."""

_PLAIN = (bool, int, float, str, type(None))

_Place = tuple[int, str]
"""The index of a module and the name of its attribute."""

_Snapshot = list[tuple[dict[str, Any], int, list[str], list[Any]]]

_STAGE = -1


class AttributeSync:
    """Keeps plain attributes (numbers, strings, None, tensors) equal in the modules of the stage and of the members.

    Other attributes stay as they were when the array was made, except for `catch_up`.

    Args:
        stage: Model that runs for all members.
        members: Members of the array.
        apart: Containers and keys of values that have a slot of their own.
    """

    def __init__(self, stage: nn.Module, members: Sequence[nn.Module], apart: Iterable[tuple[Any, Any]]) -> None:
        self._apart = {(id(container), key) for container, key in apart}
        found = {path: module for path, module in stage.named_modules() if not isinstance(module, UnfusedModule)}
        self._paths = list(found)
        self._stage = list(found.values())
        self._members = [[member.get_submodule(path) for path in found] for member in members]
        self._names: dict[int, tuple[int, list[str]]] = {}
        self._turn = 0
        self._seen = dict(self._plain(self._members[0]))
        self._configured = self._within_objects()
        self._held = {place: (value, self._of_members(*place)) for place, value in self._tensors(self._stage)}
        self._known: dict[int, _Snapshot] = {}
        """Last compared attributes of members that agreed with the first one, and of the stage if all agreed."""

    def pull(self) -> bool:
        """Take over changed attributes of the members; returns whether any but their modes has changed.

        Each call compares the first member, and another one by turns.

        Raises:
            FusionError: An attribute was not changed alike in all members, or to tensors of different shapes.
        """
        self._turn = (self._turn + 1) % len(self._members)
        changed = [] if self._is_known(0) and self._is_known(self._turn) else self._pull_all()
        for place, (_, theirs) in self._held.items():
            values = self._of_members(*place)
            if any(value is not before for value, before in zip(values, theirs, strict=True)):
                changed.append(place)
                self._gather(place, values)
        return any(name != "training" for _, name in changed)

    def _pull_all(self) -> list[_Place]:
        now = dict(self._plain(self._members[0]))
        changed = [place for place, value in now.items() if _differ(value, self._seen.get(place, _MISSING))]
        for i, name in changed:
            for b in range(len(self._members)):
                self._check(b, i, name, now[i, name])
            setattr(self._stage[i], name, now[i, name])
        self._seen = now
        if changed:
            self._known.clear()
        for (i, name), value in self._plain(self._members[self._turn]):
            if _differ(value, now.get((i, name), _MISSING)):
                self._check(self._turn, i, name, now.get((i, name), _MISSING))
        for place, _ in self._tensors(self._members[0]):  # tensors that members have set by themselves
            self._held.setdefault(place, (None, [None] * len(self._members)))
        for b in (0, self._turn):
            self._known[b] = self._snapshot(self._members[b])
        return changed

    def push(self) -> None:
        """Copy attributes that a run has changed in the stage to the members."""
        if self._is_known(_STAGE):
            return
        for (i, name), value in self._plain(self._stage):
            if _differ(value, self._seen.get((i, name), _MISSING)):
                self._seen[i, name] = value
                for modules in self._members:
                    setattr(modules[i], name, value)
        for (i, name), tensor in list(self._tensors(self._stage)):
            if tensor is not self._held.get((i, name), (None, ()))[0]:
                for b, modules in enumerate(self._members):
                    setattr(modules[i], name, tensor.whole[b] if isinstance(tensor, Stacked) else tensor)
                self._held[i, name] = (tensor, self._of_members(i, name))
        self._known[_STAGE] = self._snapshot(self._stage)

    def catch_up(self) -> None:
        """Take over equal changes within objects that members hold, as where models complete their configurations."""
        now = self._within_objects()
        for (place, name), value in now.items():
            if _differ(value, self._configured.get((place, name), _MISSING)):
                theirs = [getattr(held, name, _MISSING) for held in self._of_members(*place)]
                mine = vars(vars(self._stage[place[0]])[place[1]])
                if not any(_differ(value, other) for other in theirs) and (id(mine), name) not in self._apart:
                    mine[name] = value
        self._configured = now

    def _check(self, b: int, i: int, name: str, value: Any) -> None:
        if _differ(vars(self._members[b][i]).get(name, _MISSING), value):
            path = f"{self._paths[i]}.{name}".lstrip(".")
            raise FusionError(f"members 0 and {b} have come to differ in {path!r}; fuse them again")

    def _gather(self, place: _Place, values: list[Any]) -> None:
        i, name = place
        if not all(isinstance(value, Tensor) and value.shape == values[0].shape for value in values):
            path = f"{self._paths[i]}.{name}".lstrip(".")
            raise FusionError(f"the members have come to differ in the shape of {path!r}; fuse them again")
        setattr(self._stage[i], name, Stacked(torch.stack(values)))
        self._held[place] = (vars(self._stage[i])[name], values)

    def _of_members(self, i: int, name: str) -> list[Any]:
        return [vars(modules[i]).get(name) for modules in self._members]

    def _plain(self, modules: Sequence[nn.Module]) -> Iterator[tuple[_Place, Any]]:
        for i, module in enumerate(modules):
            attributes = vars(module)
            for name in self._own(attributes):
                value = attributes.get(name, _MISSING)
                if isinstance(value, _PLAIN) and not isinstance(value, Tensor):
                    yield (i, name), value

    def _tensors(self, modules: Sequence[nn.Module]) -> Iterator[tuple[_Place, Any]]:
        for i, module in enumerate(modules):
            attributes = vars(module)
            for name in self._own(attributes):
                value = attributes.get(name, _MISSING)
                if isinstance(value, Tensor):
                    yield (i, name), value

    def _within_objects(self) -> dict[tuple[_Place, str], Any]:
        """Plain values in the attributes of objects that are attributes of the first member's modules."""
        return {
            ((i, name), inner): value
            for i, module in enumerate(self._members[0])
            for name, held in vars(module).items()
            if hasattr(held, "__dict__") and not callable(held) and not isinstance(held, Tensor)
            for inner, value in vars(held).items()
            if isinstance(value, _PLAIN)
        }

    def _snapshot(self, modules: Sequence[nn.Module]) -> _Snapshot:
        """Each module's attributes: their number, names and values."""
        own = [(vars(module), self._own(vars(module))) for module in modules]
        return [
            (attributes, len(attributes), names, [attributes.get(name) for name in names]) for attributes, names in own
        ]

    def _is_known(self, whose: int) -> bool:
        """Whether all attributes are the same objects as when they were last compared."""
        return whose in self._known and all(
            len(attributes) == count and all(map(is_, map(attributes.get, names), values))
            for attributes, count, names, values in self._known[whose]
        )

    def _own(self, attributes: dict[str, Any]) -> list[str]:
        """Names of a module's own attributes without a slot; found anew when the number of attributes has changed."""
        count, names = self._names.get(id(attributes), (-1, []))
        if count != len(attributes):
            key = id(attributes)
            names = [name for name in attributes if name not in OF_EVERY_MODULE and (key, name) not in self._apart]
            self._names[key] = (len(attributes), names)
        return names


_MISSING = object()


def attributes_of(model: nn.Module) -> dict[tuple[int, str], Any]:
    """Attributes that user code has set on the modules of a model, without tensors, which have slots."""
    return {
        (id(module), name): value
        for module in model.modules()
        for name, value in vars(module).items()
        if name not in ("_parameters", "_buffers", "_modules", "training") and not isinstance(value, Tensor)
    }


def _differ(value: Any, other: Any) -> bool:
    return value is not other and (type(value) is not type(other) or value != other)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class ModuleChangeDetector:
    """Checks that a member still has the tensors, submodules and hooks that it had when it was fused.

    Checking all members in every run would cost as much as a small model, so a run checks one of them.

    Args:
        stage: Model that runs for all members.
        members: Members of the array.
        slots: Settled slots of their tensors.
        apart: Paths of submodules that run member by member, below which members may change.
    """

    def __init__(
        self, stage: nn.Module, members: Sequence[nn.Module], slots: Sequence[Slot], apart: Iterable[str]
    ) -> None:
        paths = list(apart)
        self._registered: list[dict[str, Any]] = [
            container
            for module in stage.modules()
            for container in (module._parameters, module._buffers, module._modules)
            if isinstance(container, dict)
        ]
        self._before = [dict(container) for container in self._registered]
        self._count = sum(map(len, self._registered))
        self._tensors = [
            [
                (slot, slot.own[b], container, key)
                for slot in slots
                if slot.registered
                for container, key in slot.places[b + 1]
                if isinstance(container, dict)
            ]
            for b in range(len(members))
        ]
        self._children: list[list[tuple[str, dict[str, Any], str, nn.Module]]] = []
        self._hooks: list[list[dict[int, Any]]] = []
        for member in members:
            left_out = {member.get_submodule(path) for path in paths}
            modules = list(member.named_modules(memo=left_out))
            self._children.append(
                [
                    (f"{path}.{name}" if path else name, module._modules, name, child)
                    for path, module in modules
                    for name, child in module._modules.items()
                    if child is not None and isinstance(module._modules, dict)
                ]
            )
            self._hooks.append([getattr(module, name) for _, module in modules for name in _HOOKS])
        self._hooked = [sum(map(len, hooks)) for hooks in self._hooks]

    def tensors(self, b: int) -> None:
        """Check a member's parameters and buffers.

        Raises:
            FusionError: A tensor has been replaced, removed or moved in memory, or is frozen unlike the others'.
        """
        for slot, own, container, key in self._tensors[b]:
            if container.get(key) is not own:
                raise FusionError(
                    f"member {b}: {slot.path!r} has been replaced or removed since the models were fused, so the array "
                    "does not see it; change it in place (under torch.no_grad()), or fuse the models again"
                )
            if own.data_ptr() != slot.addresses[b]:
                raise FusionError(
                    f"member {b}: {slot.path!r} has been given other memory since the models were fused (`.data =`, "
                    "`.to()`, `.float()`), so the array does not see it; change it in place or do it to the array, or "
                    "fuse the models again"
                )
            if own.requires_grad != slot.own[0].requires_grad:
                slot.check_frozen_alike()

    def take_back(self) -> tuple[set[str], set[str]]:
        """Undo the additions and removals of parts of the stage by a function; returns the names of both."""
        added: set[str] = set()
        removed: set[str] = set()
        if sum(map(len, self._registered)) != self._count:
            for container, before in zip(self._registered, self._before, strict=True):
                added |= container.keys() - before.keys()
                removed |= before.keys() - container.keys()
                if container.keys() != before.keys():
                    container.clear()
                    container.update(before)
        return added, removed

    def modules(self, b: int) -> None:
        """Check a member's submodules and hooks, of which the stage has copies.

        Raises:
            FusionError: A submodule has been replaced or removed, or a hook has been added or removed.
        """
        for path, container, name, child in self._children[b]:
            if container.get(name) is not child:
                raise FusionError(
                    f"member {b}: the module {path!r} has been replaced or removed since the models were fused, so the "
                    "array does not see it; fuse the models again"
                )
        if sum(map(len, self._hooks[b])) != self._hooked[b]:
            raise FusionError(
                f"member {b}: a hook has been registered or removed since the models were fused, so the array does not "
                "see it; do so before, and fuse the models again"
            )
