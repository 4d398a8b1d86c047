"""Gradients that a step leaves for the next one: accumulation by hand, parameters that no optimizer has."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.core.errors import FusionError
from shoal.fuse.array import ModelArray

__all__ = ["KeptGradients", "enter_array", "uncleared"]


class KeptGradients:
    """Gradients of a trial: on its own parameters, or on those of the array while the trial is a member.

    Args:
        kept: Whether a step may read gradients of the previous step; otherwise none are kept.
    """

    def __init__(self, model: nn.Module, kept: bool) -> None:
        self.kept = kept
        self.array: tuple[ModelArray, int] | None = None
        """Array that holds the gradients, and the trial's index in it."""
        self._model = model

    def read(self) -> dict[str, Tensor]:
        """Return the gradients by parameter, without copying them."""
        if not self.kept:
            return {}
        rows: dict[int, Tensor | None] = {}
        if self.array is not None:
            array, b = self.array
            stacked = [(data.grad, own[b]) for _, data, own in array.stacked_tensors()]
            rows = {id(own): None if grad is None else grad[b] for grad, own in stacked}
        found = {name: rows.get(id(each), each.grad) for name, each in self._model.named_parameters()}
        return {name: grad.detach() for name, grad in found.items() if grad is not None}

    def set(self, gradients: Mapping[str, Tensor]) -> None:
        """Let the parameters hold copies of these gradients, and no others."""
        self.array = None
        for name, each in self._model.named_parameters():
            each.grad = gradients[name].to(each.device, copy=True) if name in gradients else None

    def leave(self) -> None:
        """Let the parameters hold what an array holds for them."""
        if self.array is not None:
            self.set(self.read())


def enter_array(array: ModelArray, members: Sequence[KeptGradients]) -> None:
    """Move the gradients of the members of an array into it.

    Raises:
        FusionError: Some members have a gradient of a parameter, and others have none.
    """
    columns = [(path, data, own, [each.grad for each in own]) for path, data, own in array.stacked_tensors()]
    for path, _, _, grads in columns:
        without = [b for b, grad in enumerate(grads) if grad is None]
        if 0 < len(without) < len(grads):
            raise FusionError(
                f"an earlier step has left a gradient of {path!r} in some members and none in members {without}"
            )
    for _, data, own, grads in columns:
        present = [grad for grad in grads if grad is not None]
        data.grad = torch.stack(present) if present else None
        for each in own:
            each.grad = None
    for b, member in enumerate(members):
        member.array = array, b


def uncleared(model: nn.Module, optimizers: Iterable[Optimizer], max_norm: float | None) -> str:
    """Return the first parameter whose gradients no optimizer clears, so that they add up in the norm; "" for none."""
    if max_norm is None:
        return ""
    known = {id(each) for one in optimizers for group in one.param_groups for each in group["params"]}
    return next((name for name, each in model.named_parameters() if each.requires_grad and id(each) not in known), "")
