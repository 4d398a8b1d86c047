"""The loss scale of one model that trains in float16, kept by the rule of `torch.amp.GradScaler`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.core.errors import FusionError
from shoal.fuse.grads import Gradients

__all__ = ["LossScale"]


@dataclass(eq=False)
class LossScale:
    """A loss scale on the host (Micikevicius et al., arXiv:1710.03740).

    Scale the loss, run the backward pass, call `unscale_`, step the optimizer unless `overflowed`, call `update`.

    Args:
        growth_tracker: Steps in a row without an overflow so far.
    """

    scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    growth_tracker: int = 0

    def __post_init__(self) -> None:
        self.overflowed = False

    def scaled(self, loss: Tensor) -> Tensor:
        """The loss, shape [], times the scale; at least in float32."""
        return loss * torch.tensor(self.scale, dtype=torch.float32)

    @torch.no_grad()
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients, none of which may be float16, by the scale, and set `overflowed`."""
        found = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        if any(grad.dtype == torch.float16 for grad in found):
            raise FusionError(
                "a gradient is float16, in which scaled losses overflow; keep parameters in float32 and run the model "
                "under torch.autocast"
            )
        gradients = Gradients(1, (), [(0, grad._values() if grad.is_sparse else grad) for grad in found])
        self.overflowed = not isfinite(gradients.norms(inf).item())
        gradients.multiply_(torch.tensor([self.scale], dtype=torch.float64).reciprocal().float())

    def update(self) -> None:
        """Shrink the scale if the last step overflowed; else count the step, and grow the scale if it is due."""
        self.growth_tracker = 0 if self.overflowed else self.growth_tracker + 1
        if self.overflowed:
            self.scale = _float32(self.scale * self.backoff_factor)
        elif self.growth_tracker == self.growth_interval:
            self.growth_tracker = 0
            if isfinite(grown := _float32(self.scale * self.growth_factor)):
                self.scale = grown

    def state_dict(self) -> dict[str, Any]:
        """The state, which a `torch.amp.GradScaler` can load."""
        state = asdict(self)
        state["_growth_tracker"] = state.pop("growth_tracker")
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` of this class or of `torch.amp.GradScaler` returned."""
        for name in self.state_dict():
            setattr(self, name.removeprefix("_"), state[name])


def _float32(value: float) -> float:
    """A number rounded to float32, in which torch keeps scales."""
    return torch.tensor(value, dtype=torch.float64).float().item()
