"""Dropout with each member's own mask and rate; see `shoal.fuse.randomness`."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.randomness import current, keep_mask
from shoal.fuse.stacked import Stacked

__all__ = ["RULES", "drop"]


def drop(data: Tensor, p: Any, mask_shape: tuple[int, ...]) -> Tensor:
    """All members' data with elements zeroed at rate `p` and the others scaled by 1 / (1 - p).

    Args:
        data: what is dropped, [B, *shape].
        p: the rate, a float or stacked numbers.
        mask_shape: of one member's mask; broadcasts to its data (channel dropout has ones).
    """
    keys = current(len(data)).next()
    rate: Any = p
    scale: Any
    if isinstance(p, Stacked):
        shape = (-1, *[1] * (data.dim() - 1))
        rates = p.numbers or ()
        rate = torch.tensor(rates, dtype=torch.float64, device=data.device).view(shape)
        scales = [1 / (1 - one) if one < 1 else 0.0 for one in rates]
        scale = torch.tensor(scales, dtype=torch.float64, device=data.device).view(shape)
    elif p == 1:
        return data * 0.0
    else:
        scale = 1 / (1 - p)
    kept = keep_mask(keys, mask_shape, rate, data.device).to(data.dtype)
    factor: Tensor = kept * scale
    return data * factor.to(data.dtype)


def _dropout(channels: bool) -> Any:
    def rule(func: Any, input: Any, p: Any = 0.5, training: bool = True, inplace: bool = False) -> Any:
        rates = (p,) if not isinstance(p, Stacked) else p.numbers
        if rates is None or not isinstance(input, Stacked):
            return NotImplemented
        for rate in rates:
            if not 0 <= rate <= 1:
                raise ValueError(f"dropout probability has to be between 0 and 1, but got {rate}")
        if not training or max(rates) == 0:
            return input
        shape = tuple(input.shape)
        if channels:  # the last axes of a batch of channels, or of one sample's
            lead = 2 if input.dim() > _SPATIAL[func] + 1 else 1
            shape = shape[:lead] + (1,) * (len(shape) - lead)
        out = drop(input.whole, p, shape)
        if inplace or func is torch.dropout_:
            input.whole.copy_(out)
            return input
        return Stacked(out)

    return rule


_SPATIAL = {F.dropout1d: 1, F.dropout2d: 2, F.dropout3d: 3}
_plain = _dropout(channels=False)
RULES: dict[Any, Any] = {
    F.dropout: _plain,
    torch.dropout: lambda func, input, p, train: _plain(func, input, p, train),
    torch.dropout_: lambda func, input, p, train: _plain(func, input, p, train),
    **dict.fromkeys(_SPATIAL, _dropout(channels=True)),
}
