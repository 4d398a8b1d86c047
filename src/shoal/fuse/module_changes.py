"""Changes in members that an array cannot follow, once it has been made of them."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from shoal.core.errors import FusionError
from shoal.fuse.slots import Slot

__all__ = ["ModuleChangeDetector"]

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


class ModuleChangeDetector:
    """Looks whether a member still is what was fused.

    To look at all members in every run would cost as much as small models do, so a run looks at one.

    Args:
        stage: what stands for the members when all run at once.
        members: of the array.
        slots: of their tensors, settled.
        apart: paths of submodules that run member by member, which may change below these.
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
        """Look at a member's parameters and buffers.

        Raises:
            FusionError: one has been replaced or removed, lies elsewhere in memory, or is frozen unlike the others'.
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
        """Undo what a function has registered in the stage, or removed from it; returns the names of both."""
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
        """Look at a member's submodules and hooks, of which runs of all members at once have copies.

        Raises:
            FusionError: a submodule has been replaced or removed, or a hook has been added or removed.
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
