"""Connectionist temporal classification, with B folded into the batch."""

from typing import Any

import torch
import torch.nn.functional as F

from shoal.fuse.rules.base import Rule
from shoal.fuse.rules.loss import reduced
from shoal.fuse.stacked import Stacked

__all__ = ["RULES"]


def _ctc_loss(
    func: Any,
    log_probs: Any,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Any:
    if not isinstance(log_probs, Stacked) or log_probs.dim() != 3:
        return NotImplemented
    members, steps, samples, classes = log_probs.whole.shape

    def folded(value: Any) -> torch.Tensor:
        """[N, ...] of each, or of all, as [B*N, ...]."""
        own: torch.Tensor = value.whole if isinstance(value, Stacked) else torch.as_tensor(value)
        return own.flatten(0, 1) if isinstance(value, Stacked) else own.repeat(members, *[1] * (own.dim() - 1))

    lengths = folded(target_lengths)
    if len(lengths) != members * samples:
        return NotImplemented
    losses = F.ctc_loss(
        log_probs.whole.transpose(0, 1).reshape(steps, members * samples, classes),
        folded(targets),
        folded(input_lengths),
        lengths,
        blank,
        "none",
        zero_infinity,
    )
    if reduction == "mean":  # per label, then over samples
        losses = losses / lengths.clamp(min=1).to(losses)
    return Stacked(reduced(losses.view(members, samples), reduction))


RULES = (Rule.direct(_ctc_loss, F.ctc_loss),)
