"""The gradients of an array, each member's by themselves."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from shoal.fuse.array import ModelArray
from shoal.fuse.missing_grads import absent

__all__ = ["Gradients"]


@dataclass(frozen=True)
class Gradients:
    """What `backward` left, to be measured and changed in place.

    Args:
        members: B.
        stacked: of parameters that count for all members, [B, *shape] each.
        apart: of parameters that count for some: the member and its gradient, [*shape].
    """

    members: int
    stacked: Sequence[Tensor]
    apart: Sequence[tuple[int, Tensor]]

    @classmethod
    def of(cls, array: ModelArray, params: Collection[int] | None = None) -> "Gradients":
        """The gradients that there are.

        Args:
            array: the models, after `backward`.
            params: `id`s of the members' own parameters that count; by default all do.
        """
        stacked = []
        apart = [(b, p.grad) for _, b, p in array.apart() if p.grad is not None and (params is None or id(p) in params)]
        for _, data, own in array.columns():
            if data.grad is None:
                continue
            counted: Sequence[int] = range(len(own))
            if params is not None:
                counted = [b for b, p in enumerate(own) if id(p) in params]
            if missing := absent(data):
                counted = [b for b in counted if b not in missing]
            if len(counted) == len(own):
                stacked.append(data.grad)
            else:
                apart += [(b, data.grad[b]) for b in counted]
        return cls(len(array), stacked, apart)

    def norms(self, order: float) -> Tensor:
        """Each member's norm over all of its gradients, [B]: the norm of their norms, as torch computes it."""
        parts = [
            torch.linalg.vector_norm(grad.unsqueeze(-1), order, dim=tuple(range(1, grad.dim() + 1)))
            for grad in self.stacked
        ]
        if self.apart:
            owners, grads = zip(*self.apart, strict=True)
            own = torch.stack(torch._foreach_norm(grads, order))
            neutral = own.new_full((len(grads), self.members), 0.0 if order >= 0 else inf)
            neutral[torch.arange(len(grads)), torch.tensor(owners)] = own
            parts.extend(neutral)
        if not parts:
            return torch.zeros(self.members)
        norms: Tensor = torch.linalg.vector_norm(torch.stack(parts), order, dim=0)
        return norms

    def multiply_(self, factors: Tensor) -> None:
        """Multiply each member's gradients by its factor, [B]."""
        grads, each = self._beside(factors)
        if grads:
            torch._foreach_mul_(grads, each)

    def clamp_(self, limits: Tensor) -> None:
        """Bring each member's gradients to within plus and minus its limit, [B]."""
        grads, each = self._beside(limits)
        if grads:
            bounds = [limit.to(grad.dtype) for limit, grad in zip(each, grads, strict=True)]
            torch._foreach_clamp_min_(grads, torch._foreach_neg(bounds))
            torch._foreach_clamp_max_(grads, bounds)

    def _beside(self, values: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """All gradients, and for each one the members' values, [B], in a shape and place to be combined with it."""
        grads = [*self.stacked, *(grad for _, grad in self.apart)]
        if grads:
            values = values.to(grads[0].device)
        spread = [values.view(-1, *[1] * (grad.dim() - 1)) for grad in self.stacked]
        return grads, [*spread, *(values[b] for b, _ in self.apart)]
