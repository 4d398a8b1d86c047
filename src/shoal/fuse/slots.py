"""One value that the members of an array hold apart, and its places: a parameter, a buffer, a tensor, a float."""

from collections import deque
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import FusionError
from shoal.fuse.frozen import lent, note_lent
from shoal.fuse.member_changes import OF_EVERY_MODULE
from shoal.fuse.rows import joined, memory_of
from shoal.fuse.stacked import Numbers, Stacked

__all__ = ["Slot", "keep", "keep_rows", "own_memory"]

Place = tuple[Any, Any]
"""A container and a key: a module's parameters, its attributes, a list among them."""


@dataclass(eq=False)
class Slot:
    """One value that the members hold apart, and every place of a model where it is looked up.

    Args:
        path: of its first place, "layers.0.weight".
        own: the members' tensors; empty for floats.
        places: the stage's, then each member's.
        registered: a parameter or buffer, which moves and is saved with its module.
        numbers: the members' floats.
        shared: a frozen parameter with equal values, stored once: [*shape] in place of [B, *shape]. So is that of a
            lone member whose memory others use, in whatever array they are.
        alike: a buffer of equal values, shown once: what is computed of it is computed once. Ends when they differ.
        home: container and key of the stacked tensor, shape [B, *shape].
    """

    path: str
    own: list[Tensor]
    places: list[list[Place]]
    registered: bool = False
    numbers: tuple[float, ...] | None = None
    shared: bool = False
    alike: bool = False
    home: Place = field(default=({}, None))
    shown: Tensor | None = None
    versions: tuple[int, ...] = ()
    addresses: Sequence[int] = ()

    def __post_init__(self) -> None:
        self.trainable = self.registered and isinstance(self.own[0], nn.Parameter)

    @property
    def data(self) -> Tensor:
        """All members' tensors, [B, *shape]; [*shape] if shared."""
        container, key = self.home
        return container[key]  # type: ignore[no-any-return]

    def settle(self, stacked: nn.Module, frozen: nn.Module) -> None:
        """Bring the members' tensors together and make theirs views, so that their own memory is free at once.

        Args:
            stacked: gets the stacked tensor, as a parameter or buffer under its path, if the members' are such.
            frozen: gets the one tensor of a shared slot.
        """
        if not self.own:
            return
        data = self.own[0].detach() if self.shared else joined(self.own, move=True)
        if self.trainable and not self.shared and any(map(lent, self.own)):
            data = data.clone()  # they have not been moved, and others use their memory
        if not self.registered:
            self.home = ({"": data}, "")
        else:
            *path, name = self.path.split(".")
            module = _descend(frozen if self.shared else stacked, path)
            if isinstance(self.own[0], nn.Parameter):
                parameter = nn.Parameter(data)
                parameter.register_hook(own_memory)  # type: ignore[no-untyped-call]
                parameter.requires_grad_(self.own[0].requires_grad)
                module.register_parameter(name, parameter)
                self.home = (module._parameters, name)
            else:
                module.register_buffer(name, data)
                self.home = (module._buffers, name)
        self.adopt()

    def adopt(self) -> None:
        """Make the members' tensors views of the stacked one."""
        self.shown = None
        for own, row in zip(self.own, self.rows(), strict=True):
            own.data = row
        if self.shared:
            note_lent(self.own)
        self.versions = self.own_versions() if self.shared else self._versions()
        self.addresses = [own.data_ptr() for own in self.own]

    def rows(self) -> Sequence[Tensor]:
        """The members' tensors as views, part of no graph."""
        if not self.own:
            return ()
        data = self.data.detach()
        return [data] * len(self.own) if self.shared else data.unbind(0)

    def show(self) -> None:
        """Put the stacked tensor in all places of the stage."""
        if self.numbers is not None:
            self.shown = Stacked.of_numbers(self.numbers)
        elif self.shared:
            self.shown = self.data
        elif self.alike and self._still_alike():
            self.shown = self.data[0]
        elif not isinstance(self.shown, Stacked) or self.shown.whole is not self.data:
            self.shown = Stacked(self.data)
        self.put(0, self.shown)

    def put(self, which: int, value: Any) -> None:
        """Put a value in all places of the stage (0) or of member `which` - 1."""
        for container, key in self.places[which]:
            container[key] = value

    def found(self, which: int) -> Any:
        """What stands in the first place."""
        container, key = self.places[which][0]
        return container.get(key) if isinstance(container, dict) else container[key]

    def keep_alike(self) -> None:
        """Do to all members what was done to the one value that was shown."""
        if self.alike:
            if not isinstance(self.shown, Stacked) and self.versions != self._versions():
                self.data[1:].copy_(self.data[0].expand_as(self.data[1:]))
            self.versions = self._versions()

    def take(self, value: Any) -> None:
        """Take over what user code has put in the stage's place."""
        if self.numbers is not None and isinstance(value, float):
            self.numbers = value.numbers if isinstance(value, Numbers) else (value,) * len(self.numbers)
            for b, number in enumerate(self.numbers, start=1):
                self.put(b, number)
        elif isinstance(value, Tensor) and self.own and not self.shared:
            new = value.whole if isinstance(value, Stacked) else value.expand(len(self.own), *value.shape)
            self.alike = self.alike and not isinstance(value, Stacked)
            if self.registered:
                _copy(self.path, self.data, new)
            else:
                self.home[0][self.home[1]] = new
                self.own = list(new.unbind(0))
                for b, row in enumerate(self.own, start=1):
                    self.put(b, row)

    def take_row(self, b: int, value: Any) -> None:
        """Take over what user code has put in the place of member b."""
        if isinstance(value, Tensor):
            stacked = self.data.data[b]
            _copy(self.path, stacked, value)
            self.own[b].data = stacked
            self.versions = ()  # it was done behind autograd's back, so whether members are alike is to be looked at
        self.put(b + 1, self.own[b])

    def part(self, stacked: nn.Module) -> None:
        """Give each member its own value of what was kept once."""
        container, key = self.home
        del container[key]
        self.shared = False
        self.settle(stacked, stacked)

    def follow(self) -> bool:
        """Freeze or unfreeze the stacked parameter, or change the numbers, as in the members; whether any changed."""
        if self.numbers is not None:
            found = tuple(self.found(b + 1) for b in range(len(self.numbers)))
            if found == self.numbers or not all(isinstance(number, float) for number in found):
                return False
            self.numbers = found
            return True
        if not self.trainable or self.own[0].requires_grad == self.data.requires_grad:
            return False
        wanted = self.own[0].requires_grad
        self.check_requires_grad(wanted)
        self.check_frozen_alike()
        self.data.requires_grad_(wanted)
        return True

    def freeze_members(self) -> bool:
        """Freeze or unfreeze the members' own parameters as a run has done to the stacked one; whether it has."""
        if not self.trainable or self.shared or self.own[0].requires_grad == self.data.requires_grad:
            return False
        for own in self.own:
            own.requires_grad_(self.data.requires_grad)
        return True

    def check_frozen_alike(self) -> None:
        """Refuse what is frozen in some members only.

        Raises:
            FusionError: it is.
        """
        frozen = [b for b, own in enumerate(self.own) if not own.requires_grad]
        if 0 < len(frozen) < len(self.own):
            raise FusionError(
                f"{self.path!r} is frozen in members {frozen} and not in the others; do alike in all members, or fuse "
                "them again with strict=False, so that it runs apart"
            )

    def check_requires_grad(self, requires_grad: bool) -> None:
        """Refuse to unfreeze a parameter that is kept once.

        Raises:
            FusionError: it is.
        """
        if self.shared and requires_grad:
            raise FusionError(
                f"{self.path!r} was frozen when the array was made and is kept once for all members; to train it, fuse "
                "copies (copy.deepcopy) of the members after unfreezing them"
            )

    def stand_in(self, tensor: Tensor, versions: tuple[int, ...] | None = None) -> None:
        """Have another stacked tensor in the place of the slot's own, its members as alike as they are."""
        self.home[0][self.home[1]] = tensor
        self.versions = self._versions() if versions is None else versions

    def _still_alike(self) -> bool:
        """Whether the members' values are equal, looked at again where anything was written to one of them."""
        if self.versions != self._versions():
            self.versions = self._versions()
            self.alike = bool((self.data == self.data[:1]).all())
        return self.alike

    def own_versions(self) -> tuple[int, ...]:
        """Grow with what is written to the members' own tensors."""
        return tuple(own._version for own in self.own)

    def _versions(self) -> tuple[int, ...]:
        return (self.data._version, *[own._version for own in self.own]) if self.alike else ()


def keep(slots: Sequence[Slot], stage: nn.Module) -> None:
    """Take over what user code has put in the stage's places, or has done to what all members share.

    Raises:
        FusionError: it has put another tensor in the place of a parameter, or one of another shape in that of a buffer.
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
    """Take over what user code has put in the places of member b, where rows of the stacked tensors or its own stood.

    Raises:
        FusionError: as `keep`.
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
    """Values that were put in slots' places; those that lie where another is about to be copied to are copied first, as
    of buffers that change places. So is what the model has put elsewhere of what stood there: in attributes, or in
    lists, deques and dicts there.
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
    """Copy the tensors among a container's items that lie in some memory."""
    for key, value in list(items):
        copied = _apart_from(written, value)
        if copied is not value:
            container[key] = copied


def _apart_from(written: Set[int], value: Any) -> Any:
    if isinstance(value, Stacked):
        return Stacked(value.whole.detach().clone()) if memory_of(value.whole) in written else value
    return value.detach().clone() if isinstance(value, Tensor) and memory_of(value) in written else value


def _descend(root: nn.Module, path: Sequence[str]) -> nn.Module:
    """The module at a path, which is made where it is missing."""
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    return root


def _copy(path: str, target: Tensor, value: Tensor) -> None:
    if target.shape != value.shape:
        shapes = f"from {tuple(target.shape)} to {tuple(value.shape)}"
        raise FusionError(f"{path!r} changes its shape while the array runs, {shapes}; keep it or do not register it")
    with torch.no_grad():
        target.copy_(value)


def own_memory(grad: Tensor) -> Tensor | None:
    """A parameter's gradient, copied if another parameter's lies in the same memory.

    Autograd takes over a gradient that is a view without looking who else holds a view of its base (of a sum `p + q`
    both are handed the same memory), so what is accumulated or clipped in place for one would be so for the other.
    """
    base = grad._base
    if base is None or base._use_count() <= 2:  # type: ignore[attr-defined]  # `base` here, and the view
        return None
    return grad.clone()
