"""Slots: values of which each member has its own (parameters, buffers, tensors, floats), and where models hold them."""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from itertools import chain
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import FusionError
from shoal.fuse.frozen import is_shared, record_shared, same_values, share_storage
from shoal.fuse.rows import is_packed, stack_rows, unstackable
from shoal.fuse.stacked import Stacked, StackedFloat

__all__ = ["Slot", "find_slots", "tensors_within", "unalias_grad"]

Place = tuple[Any, Any]
"""A container (the parameters or attributes of a module, or a list among these) and a key in it."""


@dataclass(eq=False)
class Slot:
    """One value of which each member has its own, and every place of a model that refers to it.

    Args:
        places: The places in the template, then those in each member.
        registered: Whether the value is a parameter or buffer, which is moved and saved with its module.
        shared: Whether the value is a frozen parameter with equal values, stored once as [*shape] in place of
            [B, *shape]. This also holds for a frozen parameter of a single member that shares memory with other arrays.
        uniform: Whether the value is a buffer with equal values, which user code sees as one plain tensor, so that
            results that depend on it are computed once. False as soon as the values differ.
    """

    path: str
    member_tensors: list[Tensor]
    """The members' tensors; empty for floats."""
    places: list[list[Place]]
    registered: bool = False
    floats: tuple[float, ...] | None = None
    shared: bool = False
    uniform: bool = False
    stacked_place: Place = field(default=({}, None))
    """Container and key of the stacked tensor, [B, *shape]."""
    template_value: Tensor | None = None
    versions: tuple[int, ...] = ()
    addresses: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.trainable = self.registered and isinstance(self.member_tensors[0], nn.Parameter)

    @property
    def data(self) -> Tensor:
        """All members' tensors, [B, *shape]; [*shape] if shared."""
        container, key = self.stacked_place
        return container[key]  # type: ignore[no-any-return]

    def stack_members(self, stacked: nn.Module, frozen: nn.Module) -> None:
        """Stack the members' tensors, and make them views of the result, which frees their own memory."""
        if not self.member_tensors:
            return
        first = self.member_tensors[0]
        data = first.detach() if self.shared else stack_rows(self.member_tensors, move=True)
        if self.trainable and not self.shared and any(map(is_shared, self.member_tensors)):
            data = data.clone()  # `stack_rows` did not copy, and other models share the memory
        if not self.registered:
            self.stacked_place = ({"": data}, "")
        else:
            *path, name = self.path.split(".")
            module = _descend(frozen if self.shared else stacked, path)
            if self.shared and is_packed(first):
                module.register_parameter(name, first)  # type: ignore[arg-type]
                self.stacked_place = (module._parameters, name)
            elif isinstance(first, nn.Parameter):
                can_train = data.is_floating_point() or data.is_complex()
                parameter = nn.Parameter(data, can_train)
                if can_train:
                    parameter.register_hook(unalias_grad)  # type: ignore[no-untyped-call]
                    parameter.requires_grad_(first.requires_grad)
                module.register_parameter(name, parameter)
                self.stacked_place = (module._parameters, name)
            else:
                module.register_buffer(name, data)
                self.stacked_place = (module._buffers, name)
        self.bind_members()

    def bind_members(self) -> None:
        """Make the members' tensors views of the stacked one."""
        self.template_value = None
        for own, row in zip(self.member_tensors, self.rows(), strict=True):
            share_storage(own, row)
        if self.shared:
            record_shared(self.member_tensors)
        self.versions = self.own_versions() if self.shared else self._versions()
        self.addresses = [own.data_ptr() for own in self.member_tensors]

    def rows(self) -> Sequence[Tensor]:
        """Views of the stacked tensor for each member, detached from the graph; the packed parameter itself."""
        if not self.member_tensors:
            return ()
        data = self.data if self.shared and is_packed(self.data) else self.data.detach()
        return [data] * len(self.member_tensors) if self.shared else data.unbind(0)

    def install(self) -> None:
        """Put the stacked tensor in all places of the template."""
        if self.floats is not None:
            self.template_value = Stacked.of_floats(self.floats)
        elif self.shared:
            self.template_value = self.data
        elif self.uniform and self._is_uniform():
            self.template_value = self.data[0]
        elif not isinstance(self.template_value, Stacked) or self.template_value.whole is not self.data:
            self.template_value = Stacked(self.data)
        self.assign(0, self.template_value)

    def assign(self, which: int, value: Any) -> None:
        """Put a value in all places of the template (0) or of member `which` - 1."""
        for container, key in self.places[which]:
            container[key] = value

    def value_at(self, which: int) -> Any:
        """The value in the first place of the template (0) or of member `which` - 1."""
        container, key = self.places[which][0]
        return container.get(key) if isinstance(container, dict) else container[key]

    def propagate_write(self) -> None:
        """Copy writes to the one tensor that stands for a uniform value to all members."""
        if self.uniform:
            if not isinstance(self.template_value, Stacked) and self.versions != self._versions():
                self.data[1:].copy_(self.data[0].expand_as(self.data[1:]))
            self.versions = self._versions()

    def update_from(self, value: Any) -> None:
        """Copy a value that user code has assigned in the template to all members."""
        if self.floats is not None and isinstance(value, float):
            self.floats = value.floats if isinstance(value, StackedFloat) else (value,) * len(self.floats)
            for b, number in enumerate(self.floats, start=1):
                self.assign(b, number)
        elif isinstance(value, Tensor) and self.member_tensors and not self.shared:
            new = value.whole if isinstance(value, Stacked) else value.expand(len(self.member_tensors), *value.shape)
            self.uniform = self.uniform and not isinstance(value, Stacked)
            if self.registered:
                _copy_checked(self.path, self.data, new)
            else:
                self.stacked_place[0][self.stacked_place[1]] = new
                self.member_tensors = list(new.unbind(0))
                for b, row in enumerate(self.member_tensors, start=1):
                    self.assign(b, row)

    def update_member(self, b: int, value: Any) -> None:
        """Copy a value that user code has assigned in member b into the stacked tensor."""
        if isinstance(value, Tensor):
            stacked = self.data.data[b]
            _copy_checked(self.path, stacked, value)
            self.member_tensors[b].data = stacked
            self.versions = ()  # the write through `.data` did not change a version, so `_is_uniform` must compare
        self.assign(b + 1, self.member_tensors[b])

    def unshare(self, stacked: nn.Module) -> None:
        """Give each member its own copy of a shared value.

        Raises:
            FusionError: It is packed, and an array cannot hold one for each member.
        """
        if kind := unstackable(self.data):
            raise FusionError(f"a function writes to {self.path!r}, {kind}, which is kept once for all members")
        container, key = self.stacked_place
        del container[key]
        self.shared = False
        self.stack_members(stacked, stacked)

    def sync_from_members(self) -> bool:
        """Copy `requires_grad` or the floats from the members; returns whether they have changed."""
        if self.floats is not None:
            found = tuple(self.value_at(b + 1) for b in range(len(self.floats)))
            if found == self.floats or not all(isinstance(number, float) for number in found):
                return False
            self.floats = found
            return True
        if not self.trainable or self.member_tensors[0].requires_grad == self.data.requires_grad:
            return False
        wanted = self.member_tensors[0].requires_grad
        self.check_requires_grad(wanted)
        self.check_equal_requires_grad()
        self.data.requires_grad_(wanted)
        return True

    def push_requires_grad(self) -> bool:
        """Copy `requires_grad` of the stacked parameter to the members; returns whether it has changed."""
        if not self.trainable or self.shared or self.member_tensors[0].requires_grad == self.data.requires_grad:
            return False
        for own in self.member_tensors:
            own.requires_grad_(self.data.requires_grad)
        return True

    def check_equal_requires_grad(self) -> None:
        """Refuse a parameter that is frozen in some members only."""
        frozen = [b for b, own in enumerate(self.member_tensors) if not own.requires_grad]
        if 0 < len(frozen) < len(self.member_tensors):
            raise FusionError(
                f"{self.path!r} is frozen in members {frozen} and not in the others; freeze it in all or in none, or "
                "fuse them again with strict=False, so that it runs member by member"
            )

    def check_requires_grad(self, requires_grad: bool) -> None:
        """Refuse to unfreeze a parameter that is stored once."""
        if self.shared and requires_grad:
            raise FusionError(
                f"{self.path!r} was frozen when the array was made and is kept once for all members; to train it, fuse "
                "copies (copy.deepcopy) of the members after unfreezing them"
            )

    def substitute(self, tensor: Tensor, versions: tuple[int, ...] | None = None) -> None:
        """Replace the stacked tensor by another one, for tracing; `uniform` is assumed to hold for it as before."""
        self.stacked_place[0][self.stacked_place[1]] = tensor
        self.versions = self._versions() if versions is None else versions

    def _is_uniform(self) -> bool:
        """Whether the members' values are equal; they are compared again after a write to one of them."""
        if self.versions != self._versions():
            self.versions = self._versions()
            self.uniform = bool((self.data == self.data[:1]).all())
        return self.uniform

    def own_versions(self) -> tuple[int, ...]:
        """Version counters of the members' own tensors."""
        return tuple(own._version for own in self.member_tensors)

    def _versions(self) -> tuple[int, ...]:
        return (self.data._version, *[own._version for own in self.member_tensors]) if self.uniform else ()


def _descend(root: nn.Module, path: Sequence[str]) -> nn.Module:
    """The module at a path; missing modules are created."""
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root


def _copy_checked(path: str, target: Tensor, value: Tensor) -> None:
    if target.shape != value.shape:
        shapes = f"from {tuple(target.shape)} to {tuple(value.shape)}"
        raise FusionError(f"{path!r} changes its shape while the array runs, {shapes}; keep it or do not register it")
    with torch.no_grad():
        target.copy_(value)


def unalias_grad(grad: Tensor) -> Tensor | None:
    """Hook of a parameter: return a copy of its gradient if another gradient uses the same memory, else None.

    Autograd gives the gradients of both parameters of a sum `p + q` the same memory; one changed in place would change
    the other.
    """
    base = grad._base
    if base is None or base._use_count() <= 2:  # type: ignore[attr-defined]  # references: `base` here, and the view's
        return None
    return grad.clone()


def find_slots(template: nn.Module, members: Sequence[nn.Module], unfused_paths: Sequence[str] = ()) -> list[Slot]:
    """Find all slots of a model; `template` is a copy of `members[0]` with the same tensors, which slots replace."""
    names = {id(t): name for name, t in chain(members[0].named_parameters(), members[0].named_buffers())}
    passive = {id(t) for module in members[0].modules() if not _trains(module) for t in module._buffers.values()}
    slots: dict[Any, Slot] = {}
    walks = [
        list(_walk(model, "", {id(model.get_submodule(path)) for path in unfused_paths}))
        for model in (template, *members)
    ]
    if any([place[0] for place in walk] != [place[0] for place in walks[0]] for walk in walks):
        raise FusionError("the members hold tensors or floats in different places; fuse only models of one structure")
    for number, columns in enumerate(zip(*walks, strict=True)):
        path, _, _, first = columns[1]
        values = [column[3] for column in columns[1:]]
        if isinstance(first, float):
            key: Any = number
            if all(value == first or (value != value and first != first) for value in values):
                continue
            slots[key] = Slot(path, [], [[] for _ in columns], floats=tuple(map(float, values)))
        else:
            key = id(first)
            if key not in slots:
                if key not in names and (
                    isinstance(columns[1][1], tuple) or all(same_values(value, first) for value in values)
                ):
                    continue  # values in tuples were compared as part of the structure
                slots[key] = slot = Slot(names.get(key, path), values, [[] for _ in columns], registered=key in names)
                frozen = isinstance(first, nn.Parameter) and not first.requires_grad
                if slot.registered and len(members) == 1:
                    slot.shared = frozen and (is_shared(first) or is_packed(first))
                elif slot.registered and (frozen or key in passive):
                    slot.shared = frozen and all(same_values(value, first) for value in values)
                    slot.uniform = not frozen and all(same_values(value, first) for value in values)
                if frozen and not slot.shared and len(set(map(id, values))) < len(values):
                    raise FusionError(
                        f"some members share the frozen parameter {slot.path!r}, and others have another one; fuse "
                        "models of one base"
                    )
                kind = next(filter(None, map(unstackable, values)), "")
                if kind and not (slot.shared and is_packed(first)):
                    raise FusionError(
                        f"{slot.path!r} is {kind}, of which an array cannot hold one for each member; train these "
                        "models in plain PyTorch, or keep it in a plain attribute that is equal in all of them"
                    )
        for places, (_, container, name, _) in zip(slots[key].places, columns, strict=True):
            places.append((container, name))
        if isinstance(columns[0][1], tuple) or columns[0][1] is columns[1][1]:
            raise FusionError(f"the members differ in {path!r}, which cannot be replaced; keep it in a list or dict")
    return list(slots.values())


def tensors_within(model: nn.Module) -> list[Tensor]:
    """Every tensor that a model refers to, registered or not."""
    return [value for _, _, _, value in _walk(model, "", set()) if isinstance(value, Tensor)]


def _trains(module: nn.Module) -> bool:
    return any(p is not None and p.requires_grad for p in module._parameters.values())


def _walk(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield path, container, key and value of all tensors and floats that may differ between members, in order."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, nn.Module):
        for container in (value._parameters, value._buffers):
            yield from _items(container, container.items(), path, seen)
        attributes = vars(value)
        own = [
            (name, attributes[name]) for name in attributes if name not in _REGISTERED and not name.endswith("_hooks")
        ]
        yield from _items(attributes, own, path, seen)
        for name, child in value._modules.items():
            yield from _walk(child, _join(path, name), seen)
    elif isinstance(value, dict):
        yield from _items(value, value.items(), path, seen)
    elif isinstance(value, (list, tuple)):
        yield from _items(value, enumerate(value), path, seen)
    elif isinstance(value, deque):
        yield from _items(tuple(value), enumerate(value), path, seen)
    elif isinstance(value, (set, frozenset)):
        yield from _items((), enumerate(inner for inner in value if isinstance(inner, Tensor)), path, seen)
    elif isinstance(value, partial):
        yield from _items(value.keywords, value.keywords.items(), path, seen)
        yield from _items(value.args, enumerate(value.args), path, seen)
    elif not isinstance(value, _OPAQUE):
        slotted = [name for base in type(value).__mro__ for name in _slots_of(base) if hasattr(value, name)]
        yield from _items((), [(name, getattr(value, name)) for name in slotted], path, seen)
        if hasattr(value, "__dict__"):
            yield from _items(vars(value), vars(value).items(), path, seen)


def _items(container: Any, items: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any, Any, Any]]:
    for key, value in list(items):
        if type(value) in _PLAIN:
            continue
        if isinstance(value, Tensor) or (isinstance(value, float) and not isinstance(container, tuple)):
            yield _join(path, key), container, key, value
        else:
            yield from _walk(value, _join(path, key), seen)


def _slots_of(kind: type) -> Sequence[str]:
    names = vars(kind).get("__slots__", ())
    return [name for name in ([names] if isinstance(names, str) else names) if name not in ("__dict__", "__weakref__")]


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


_REGISTERED = {"_parameters", "_buffers", "_modules"}
_PLAIN = {type(None), bool, int, str}
_OPAQUE = (type, Enum, FunctionType, MethodType, ModuleType)
