"""Loss scales for training in float16: of one model, and `GradScaler` with one for each member of an array.

Both follow the rule of `torch.amp.GradScaler`. In an array an overflow skips the step of the affected member only.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shoal.core.errors import FusionError
from shoal.fuse.array import ModelArray
from shoal.fuse.checks import parse_member_values
from shoal.fuse.constants import constant
from shoal.fuse.grads import Gradients
from shoal.fuse.optim.fused import FusedOptimizer

__all__ = ["GradScaler", "LossScale"]

_DTYPES = {
    "scale": torch.float32,
    "growth_factor": torch.float64,
    "backoff_factor": torch.float64,
    "growth_interval": torch.int64,
    "_growth_tracker": torch.int64,
}
"""Names and types of the state of a `torch.amp.GradScaler`."""


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


class GradScaler:
    """B loss scales, each managed as by a `torch.amp.GradScaler` (Micikevicius et al., arXiv:1710.03740).

    If a gradient of a member is infinite or NaN, the member's scale shrinks and its step is skipped. After
    `growth_interval` steps without an overflow, the scale grows. `step` synchronises with the device once, as torch's
    scaler does.

        losses = array.map(loss, batch)
        scaler.scale(losses).sum().backward()
        scaler.unscale_(optimizer)            # only to inspect or clip the gradients
        scaler.step(optimizer)
        scaler.update()

    Args:
        array: Array of the models.
        init_scale: First scale; this and the next three settings are one number for all members or one for each.
        growth_factor: Factor above 1 by which a scale grows.
        backoff_factor: Factor below 1 by which a scale shrinks.
        growth_interval: Number of steps in a row without an overflow after which a scale grows.
        enabled: Whether losses are scaled and steps skipped.

    Raises:
        FusionError: A setting has neither one value nor one for each member, or is out of bounds.
    """

    def __init__(
        self,
        array: ModelArray,
        init_scale: float | Sequence[float] = 2.0**16,
        growth_factor: float | Sequence[float] = 2.0,
        backoff_factor: float | Sequence[float] = 0.5,
        growth_interval: int | Sequence[int] = 2000,
        enabled: bool = True,
    ) -> None:
        if not isinstance(array, ModelArray):
            raise FusionError(
                f"`array` must be what `fuse` made, got {type(array).__name__}; for one model use torch.amp.GradScaler"
            )
        array.check_present()
        self.array = array
        self._enabled = enabled
        self._overflows: dict[FusedOptimizer, Tensor] = {}
        self._stepped: set[FusedOptimizer] = set()
        self._all = self._scales((init_scale, growth_factor, backoff_factor, growth_interval, 0))
        if not all(scale.growth_factor > 1 for scale in self._all):
            raise FusionError(f"`growth_factor` must be above 1, got {growth_factor}")
        if not all(scale.backoff_factor < 1 for scale in self._all):
            raise FusionError(f"`backoff_factor` must be below 1, got {backoff_factor}")

    @classmethod
    def of(cls, array: ModelArray, scales: Sequence[LossScale]) -> "GradScaler":
        """A scaler that keeps the members' scales in these objects, one for each member; disabled if there are none."""
        scaler = cls(array, enabled=bool(scales))
        scaler._all = list(scales) or scaler._all
        return scaler

    @property
    def scales(self) -> Sequence[LossScale]:
        """The members' scales; empty if scaling is not enabled."""
        return self._all if self._enabled else ()

    def scale(self, losses: Tensor) -> Tensor:
        """Multiply each member's losses, or other outputs, by its scale.

        Args:
            losses: Losses or other outputs, [B, ...].

        Raises:
            FusionError: The leading axis is missing, or is not of size B.
        """
        if not isinstance(losses, Tensor):
            raise FusionError(f"`losses` must be a tensor [{len(self.array)}, ...], got {type(losses).__name__}")
        if losses.dim() == 0 or len(losses) != len(self.array):
            raise FusionError(
                f"`losses` must be of all {len(self.array)} members, [{len(self.array)}, ...], got shape "
                f"{tuple(losses.shape)}; scale them before they are summed"
            )
        if not self._enabled:
            return losses
        scale = constant([each.scale for each in self.scales], torch.float32, losses.device)
        scaled = losses * scale.view(-1, *[1] * (losses.dim() - 1))
        return (
            scaled if losses.dim() == 1 else scaled.to(losses.dtype)
        )  # for one member, 0-dim half times float is float

    @torch.no_grad()
    def unscale_(self, optimizer: FusedOptimizer) -> None:
        """Divide the gradients of an optimizer's parameters by the members' scales, and detect overflows.

        Raises:
            FusionError: `unscale_` was already called since `update`, a gradient has half precision, in which scaled
                losses overflow, or the optimizer is not the array's.
        """
        self._check_own(optimizer)
        if not self._enabled:
            return
        if optimizer in self._overflows:
            raise FusionError("`unscale_` or `step` was already called with this optimizer since the last `update()`")
        columns = [(path, data) for path, data, _ in self.array.stacked_tensors()]
        for path, data in (*columns, *((path, own) for path, _, own in self.array.unfused_parameters())):
            if data.grad is not None and data.grad.dtype == torch.float16:
                raise FusionError(
                    f"the gradient of {path!r} is float16, in which scaled losses overflow; keep parameters in float32 "
                    "and run the model under torch.autocast"
                )
        updated = {id(p) for member in optimizer.members for group in member.param_groups for p in group["params"]}
        gradients = Gradients.of(self.array, updated)
        largest = gradients.norms(torch.inf)
        self._overflows[optimizer] = ~torch.isfinite(largest)
        gradients.multiply_(self.get_scale().double().reciprocal().float())

    def step(self, optimizer: FusedOptimizer) -> None:
        """Step the members with finite gradients; parameters and states of the other members stay unchanged.

        Raises:
            FusionError: `step` was already called since `update`, a gradient has half precision, or the optimizer is
                not the array's.
        """
        self._check_own(optimizer)
        if not self._enabled:
            optimizer.step()
            return
        if optimizer in self._stepped:
            raise FusionError("`step` was already called with this optimizer since the last `update()`")
        if optimizer not in self._overflows:
            self.unscale_(optimizer)
        self._stepped.add(optimizer)
        self._overflows[optimizer] = found = self._overflows[optimizer].cpu()
        optimizer.step(skip=found.nonzero().flatten().tolist())

    def update(self) -> None:
        """Shrink the scales of members with an overflow in any optimizer, and grow those that are due.

        Raises:
            FusionError: No optimizer has stepped since the last update.
        """
        if not self._enabled:
            return
        if not self._overflows:
            raise FusionError("`update` is called before `step`; there are no gradients to judge the scales by")
        found = torch.stack([each.cpu() for each in self._overflows.values()]).any(0)
        for scale, overflowed in zip(self._all, found.tolist(), strict=True):
            scale.overflowed = overflowed
            scale.update()
        self._overflows.clear()
        self._stepped.clear()

    def get_scale(self) -> Tensor:
        """The members' scales, [B]; all ones if scaling is disabled."""
        return torch.tensor([each.scale for each in self.scales] or [1.0] * len(self.array), dtype=torch.float32)

    def state_dict(self) -> list[dict[str, Any]]:
        """Each member's state, which a `torch.amp.GradScaler` can load; empty dicts if scaling is disabled."""
        return [each.state_dict() for each in self.scales] or [{} for _ in range(len(self.array))]

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Load the state of each member, as returned by `state_dict` of this class or of `torch.amp.GradScaler`.

        Raises:
            FusionError: There is not one state for each member, or one is empty, from a scaler that was not enabled.
        """
        if not self._enabled:
            return
        if not isinstance(states, Sequence):
            raise FusionError(f"`states` must be a list of what `state_dict` returned for each member, got {states!r}")
        empty = [b for b, state in enumerate(states) if not state]
        if empty:
            raise FusionError(f"the states of members {empty} are empty; they come from a scaler that was not enabled")
        lacking = [(b, name) for b, state in enumerate(states) for name in _DTYPES if name not in state]
        if lacking:
            b, name = lacking[0]
            raise FusionError(f"the state of member {b} has no {name!r}; give what `state_dict` returned")
        loaded = self._scales([state[name] for state in states] for name in _DTYPES)
        for scale, state in zip(self._all, loaded, strict=True):
            scale.load_state_dict(state.state_dict())

    def _check_own(self, optimizer: FusedOptimizer) -> None:
        if not isinstance(optimizer, FusedOptimizer) or optimizer.array is not self.array:
            raise FusionError(
                "`optimizer` must be what `fuse_optimizers` made for the scaler's array, got "
                f"{'that of another one' if isinstance(optimizer, FusedOptimizer) else type(optimizer).__name__}"
            )

    def _scales(self, settings: Iterable[Any]) -> list[LossScale]:
        """The members' scales, with each setting in the order of `_DTYPES`: one number for all, or one for each."""
        columns = [
            parse_member_values(given, name, len(self.array), dtype).tolist()
            for given, (name, dtype) in zip(settings, _DTYPES.items(), strict=True)
        ]
        return [LossScale(*row) for row in zip(*columns, strict=True)]


def _float32(value: float) -> float:
    """A number rounded to float32, in which torch keeps scales."""
    return torch.tensor(value, dtype=torch.float64).float().item()
