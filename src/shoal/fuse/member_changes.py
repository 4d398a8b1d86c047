"""Changes of members after fusion: plain attributes are synchronised with the array, other changes are refused."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import FusionError
from shoal.fuse.container_sync import MODULE_ATTRIBUTES, ContainerSync
from shoal.fuse.rows import unstackable
from shoal.fuse.slots import Slot
from shoal.fuse.stacked import Stacked
from shoal.fuse.unfused_module import UnfusedModule

__all__ = ["AttributeSync", "ModuleChangeDetector"]

_PLAIN = (bool, int, float, str, type(None), torch.dtype)

_Place = tuple[int, str]
"""The index of a module and the name of its attribute."""

_TEMPLATE = -1


@dataclass(frozen=True)
class _AttributeSnapshot:
    """Attributes of modules without a slot, side by side, since they are compared in every step."""

    modules: list[dict[str, Any]]
    counts: list[int]
    """Number of all attributes of each module."""
    holders: list[dict[str, Any]]
    """For each value the attributes that it is one of."""
    names: list[str]
    values: list[Any]

    def is_same(self) -> bool:
        """Whether all are the same objects now."""
        return list(map(len, self.modules)) == self.counts and all(
            map(is_, map(dict.get, self.holders, self.names), self.values)
        )


class AttributeSync:
    """Synchronises attributes (numbers, strings, None, tensors, containers) between the template and the members.

    Values with a slot, functions and modules stay as they were.
    """

    def __init__(self, template: nn.Module, members: Sequence[nn.Module], slotted: Iterable[tuple[Any, Any]]) -> None:
        self._slotted = {(id(container), key) for container, key in slotted}
        found = {path: module for path, module in template.named_modules() if not isinstance(module, UnfusedModule)}
        self._paths = list(found)
        self._template = list(found.values())
        self._members = [[member.get_submodule(path) for path in found] for member in members]
        self._names: dict[int, tuple[int, list[str]]] = {}
        self._next_member = 0
        self._last_values = dict(self._plain_attributes(self._members[0]))
        self._containers = ContainerSync(self._template, self._members, self._slotted)
        self._stacked_attributes = {
            place: (value, self._member_values(*place)) for place, value in self._tensor_attributes(self._template)
        }
        self._compared: dict[int, _AttributeSnapshot] = {}
        """Last compared attributes: of members that agreed with the first one, and of the template if all agreed."""

    def pull(self, search: bool = False) -> bool:
        """Copy equal changes of attributes to the template; returns whether any but `training` has changed.

        Each call checks the first member and one other member, in turn. See `ContainerSync.pull` for `search`.
        """
        self._next_member = (self._next_member + 1) % len(self._members)
        changed = [] if self._is_unchanged(0) and self._is_unchanged(self._next_member) else self._pull_all()
        for place, (_, theirs) in self._stacked_attributes.items():
            values = self._member_values(*place)
            if any(value is not before for value, before in zip(values, theirs, strict=True)):
                changed.append(place)
                self._stack_attribute(place, values)
        if self._containers.pull(search):
            return True
        return any(name != "training" for _, name in changed)

    def _pull_all(self) -> list[_Place]:
        now = dict(self._plain_attributes(self._members[0]))
        changed = [place for place, value in now.items() if _differ(value, self._last_values.get(place, _MISSING))]
        for i, name in changed:
            for b in range(len(self._members)):
                self._check_attribute(b, i, name, now[i, name])
            setattr(self._template[i], name, now[i, name])
        self._last_values = now
        if changed:
            self._compared.clear()
        for (i, name), value in self._plain_attributes(self._members[self._next_member]):
            if _differ(value, now.get((i, name), _MISSING)):
                self._check_attribute(self._next_member, i, name, now.get((i, name), _MISSING))
        for place, _ in self._tensor_attributes(self._members[0]):  # tensors that user code has set on the members
            self._stacked_attributes.setdefault(place, (None, [None] * len(self._members)))
        for b in (0, self._next_member):
            self._compared[b] = self._snapshot(self._members[b])
        return changed

    def push(self, search: bool = False) -> None:
        """Copy attributes that a run has changed in the template to the members; see `ContainerSync.push`."""
        self._containers.push(search)
        if self._is_unchanged(_TEMPLATE):
            return
        for (i, name), value in self._plain_attributes(self._template):
            if _differ(value, self._last_values.get((i, name), _MISSING)):
                self._last_values[i, name] = value
                for modules in self._members:
                    setattr(modules[i], name, value)
                self._compared.clear()  # so that a return of the members to earlier values is seen
        for (i, name), tensor in list(self._tensor_attributes(self._template)):
            if tensor is not self._stacked_attributes.get((i, name), (None, ()))[0]:
                for b, modules in enumerate(self._members):
                    setattr(modules[i], name, tensor.whole[b] if isinstance(tensor, Stacked) else tensor)
                self._stacked_attributes[i, name] = (tensor, self._member_values(i, name))
        self._compared[_TEMPLATE] = self._snapshot(self._template)

    def pull_train_modes(self) -> None:
        """Copy the modes of the first member's modules to the template."""
        for module, own in zip(self._template, self._members[0], strict=True):
            module.training = own.training

    def _check_attribute(self, b: int, i: int, name: str, value: Any) -> None:
        if _differ(vars(self._members[b][i]).get(name, _MISSING), value):
            raise FusionError(f"members 0 and {b} now differ in {self._path(i, name)!r}; fuse them again")

    def _stack_attribute(self, place: _Place, values: list[Any]) -> None:
        i, name = place
        if not all(isinstance(value, Tensor) and value.shape == values[0].shape for value in values):
            raise FusionError(f"the members now differ in the shape of {self._path(i, name)!r}; fuse them again")
        if kind := unstackable(values[0]):
            path = self._path(i, name)
            raise FusionError(f"the members now have {path!r} of their own, {kind}, which cannot be stacked")
        setattr(self._template[i], name, Stacked(torch.stack(values)))
        self._stacked_attributes[place] = (vars(self._template[i])[name], values)

    def _path(self, i: int, name: str) -> str:
        return f"{self._paths[i]}.{name}".lstrip(".")

    def _member_values(self, i: int, name: str) -> list[Any]:
        return [vars(modules[i]).get(name) for modules in self._members]

    def _plain_attributes(self, modules: Sequence[nn.Module]) -> Iterator[tuple[_Place, Any]]:
        for i, module in enumerate(modules):
            attributes = vars(module)
            for name in self._unslotted_names(attributes):
                value = attributes.get(name, _MISSING)
                if isinstance(value, _PLAIN) and not isinstance(value, Tensor):
                    yield (i, name), value

    def _tensor_attributes(self, modules: Sequence[nn.Module]) -> Iterator[tuple[_Place, Any]]:
        for i, module in enumerate(modules):
            attributes = vars(module)
            for name in self._unslotted_names(attributes):
                value = attributes.get(name, _MISSING)
                if isinstance(value, Tensor):
                    yield (i, name), value

    def _snapshot(self, modules: Sequence[nn.Module]) -> _AttributeSnapshot:
        own = list(map(vars, modules))
        places = [(attributes, name) for attributes in own for name in self._unslotted_names(attributes)]
        holders, names = [attributes for attributes, _ in places], [name for _, name in places]
        return _AttributeSnapshot(own, list(map(len, own)), holders, names, list(map(dict.get, holders, names)))

    def _is_unchanged(self, whose: int) -> bool:
        """Whether all attributes are the same objects as when they were last compared."""
        return whose in self._compared and self._compared[whose].is_same()

    def _unslotted_names(self, attributes: dict[str, Any]) -> list[str]:
        """Names of a module's user attributes without a slot; updated when the number of attributes changes."""
        count, names = self._names.get(id(attributes), (-1, []))
        if count != len(attributes):
            key = id(attributes)
            names = [name for name in attributes if name not in MODULE_ATTRIBUTES and (key, name) not in self._slotted]
            self._names[key] = (len(attributes), names)
        return names


_MISSING = object()
_REQUIRES_GRAD = attrgetter("requires_grad")


def _differ(value: Any, other: Any) -> bool:
    return value is not other and (type(value) is not type(other) or value != other)


_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class ModuleChangeDetector:
    """Checks that a member still has the tensors, submodules and hooks that it had when it was fused.

    Checking all members in every run would cost as much as running a small model, so each run checks one member.
    """

    def __init__(
        self, template: nn.Module, members: Sequence[nn.Module], slots: Sequence[Slot], unfused_paths: Iterable[str]
    ) -> None:
        paths = list(unfused_paths)
        hooks = [getattr(module, name) for module in template.modules() for name in _HOOKS]
        self._hooks_of_template = set(map(id, hooks))
        self._containers: list[dict[Any, Any]] = [
            container
            for module in template.modules()
            for container in (module._parameters, module._buffers, module._modules)
            if isinstance(container, dict)
        ] + hooks
        self._before = [set(container) for container in self._containers]
        self._count = sum(map(len, self._containers))
        self._registered_tensors = [
            [
                (slot, slot.member_tensors[b], container, key)
                for slot in slots
                if slot.registered
                for container, key in slot.places[b + 1]
                if isinstance(container, dict)
            ]
            for b in range(len(members))
        ]
        self._own = [[own for _, own, _, _ in mine] for mine in self._registered_tensors]
        self._held_by = [
            ([held for _, _, held, _ in mine], [key for _, _, _, key in mine]) for mine in self._registered_tensors
        ]
        self._addresses: list[list[int]] = [[] for _ in members]
        """Addresses of each member's tensors when they were last found right."""
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
        self._hook_counts = [sum(map(len, hooks)) for hooks in self._hooks]

    def check_tensors(self, b: int) -> None:
        """Check a member's parameters and buffers."""
        own = self._own[b]
        addresses = list(map(Tensor.data_ptr, own))
        if (
            addresses == self._addresses[b]
            and all(map(is_, map(dict.get, *self._held_by[b]), own))
            and list(map(_REQUIRES_GRAD, own)) == list(map(_REQUIRES_GRAD, self._own[0]))
        ):
            return
        for slot, tensor, container, key in self._registered_tensors[b]:
            if container.get(key) is not tensor:
                raise FusionError(
                    f"member {b}: {slot.path!r} has been replaced or removed since the models were fused, so the array "
                    "does not see it; change it in place (under torch.no_grad()), or fuse the models again"
                )
            if tensor.data_ptr() != slot.addresses[b]:
                raise FusionError(
                    f"member {b}: {slot.path!r} has been given other memory since the models were fused (`.data =`, "
                    "`.to()`, `.float()`), so the array does not see it; change it in place or do it to the array, or "
                    "fuse the models again"
                )
            if tensor.requires_grad != slot.member_tensors[0].requires_grad:
                slot.check_equal_requires_grad()
        self._addresses[b] = addresses

    def registrations(self) -> list[str]:
        """Names of parts that a function has registered in the template or deleted from it; "a hook" for hooks."""
        if sum(map(len, self._containers)) == self._count:
            return []
        found: set[str] = set()
        for container, before in zip(self._containers, self._before, strict=True):
            if names := container.keys() ^ before:
                found |= {"a hook"} if id(container) in self._hooks_of_template else names
        return sorted(found)

    def check_modules(self, b: int) -> None:
        """Check a member's submodules and hooks, of which the template has copies."""
        for path, container, name, child in self._children[b]:
            if container.get(name) is not child:
                raise FusionError(
                    f"member {b}: the module {path!r} has been replaced or removed since the models were fused, so the "
                    "array does not see it; fuse the models again"
                )
        if sum(map(len, self._hooks[b])) != self._hook_counts[b]:
            raise FusionError(
                f"member {b}: a hook has been registered or removed since the models were fused, so the array does not "
                "see it; do so before, and fuse the models again"
            )
