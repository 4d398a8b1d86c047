"""One parameter of all members, or of one alone, as optimizers see it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.errors import FusionError

__all__ = ["StackedParam"]


@dataclass(frozen=True, eq=False)
class StackedParam:
    """A parameter of an array.

    Args:
        path: "layers.0.weight".
        stacked: [B, *shape]; gradients arrive here. Of a submodule in which members differ, a member's own: [*shape].
        own: the members' parameters, views of the rows of `stacked`; or that one itself.
        member: who has it alone; None: all members have one.
    """

    path: str
    stacked: Tensor
    own: Sequence[Tensor]
    member: int | None = None

    def grad(self) -> Tensor | None:
        """The members' gradients, in the shape of `stacked`.

        Raises:
            FusionError: they are sparse.
        """
        grad = self.stacked.grad
        if grad is not None and grad.layout is not torch.strided:
            raise FusionError(
                f"the gradient of {self.path!r} is sparse; make it dense (sparse=False) to fuse its model"
            )
        return grad
