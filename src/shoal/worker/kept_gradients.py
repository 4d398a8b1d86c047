"""Gradients that a `step` of the task's own leaves for its next one: accumulation by hand, adversarial training."""

from collections.abc import Mapping

from torch import Tensor, nn

from shoal.fuse.array import ModelArray
from shoal.fuse.rows import gradient_of_row

__all__ = ["KeptGradients"]


class KeptGradients:
    """The gradients of a trial, which its parameters hold or, while it is a member of an array, the array.

    Args:
        kept: Whether the task has a `step` of its own. Else each step begins without gradients, and none are kept.
    """

    def __init__(self, model: nn.Module, kept: bool) -> None:
        self.kept = kept
        self.array: tuple[ModelArray, int] | None = None
        """Array that holds them, and the trial's index in it."""
        self._model = model

    def read(self) -> dict[str, Tensor]:
        """Return the gradients by parameter; they are no copies."""
        if not self.kept:
            return {}
        rows: dict[int, Tensor | None] = {}
        if self.array is not None:
            array, b = self.array
            rows = {id(own[b]): gradient_of_row(data, b) for _, data, own in array.stacked_tensors()}
        found = {name: rows.get(id(each), each.grad) for name, each in self._model.named_parameters()}
        return {name: grad.detach() for name, grad in found.items() if grad is not None}

    def set(self, gradients: Mapping[str, Tensor]) -> None:
        """Let the parameters hold copies of these gradients, and no others."""
        self.array = None
        for name, each in self._model.named_parameters():
            each.grad = gradients[name].to(each.device, copy=True) if name in gradients else None

    def enter(self, array: ModelArray, b: int) -> None:
        """Move the gradients into an array of which the trial is a member."""
        if not self.kept:
            return
        for _, data, own in array.stacked_tensors():
            if own[b].grad is not None:
                gradient_of_row(data, b, own[b].grad)
                own[b].grad = None
        self.array = array, b

    def leave(self) -> None:
        """Let the parameters hold what an array holds for them."""
        if self.array is not None:
            self.set(self.read())
