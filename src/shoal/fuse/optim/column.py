"""One parameter of all members, as optimizers see it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.errors import FusionError

__all__ = ["Column"]


@dataclass(frozen=True, eq=False)
class Column:
    """A parameter of an array.

    Args:
        path: "layers.0.weight".
        stacked: [B, *shape]; gradients arrive here.
        own: the members' parameters, views of the rows of `stacked`.
    """

    path: str
    stacked: Tensor
    own: Sequence[Tensor]

    def grad(self) -> Tensor | None:
        """The members' gradients, [B, *shape].

        Raises:
            FusionError: they are sparse.
        """
        grad = self.stacked.grad
        if grad is not None and grad.layout is not torch.strided:
            raise FusionError(
                f"the gradient of {self.path!r} is sparse; make it dense (sparse=False) to fuse its model"
            )
        return grad
