"""Losses of TRL's `DPOTrainer`, of log-probabilities of chosen and rejected completions."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shoal.core.errors import TaskError

__all__ = ["LOSSES", "PairLoss", "PairScores", "check_losses", "shifted_mask"]


class PairScores(NamedTuple):
    """Loss of a batch of pairs, a scalar, and the sums and rewards of their completions, [n] each."""

    loss: Tensor
    chosen_log_probs: Tensor
    rejected_log_probs: Tensor
    chosen_rewards: Tensor
    rejected_rewards: Tensor


class PairLoss(nn.Module):
    """Loss of a DPOConfig, as a part of the model of its trial: members of one array may differ in it.

    Args:
        args: The arguments.
        dtype: Type of the parameters of the model.
    """

    beta: Tensor
    label_smoothing: Tensor
    discopop_tau: Tensor
    loss_weights: Tensor
    ld_alpha: Tensor | None

    def __init__(self, args: Any, dtype: torch.dtype) -> None:
        super().__init__()
        self._types = tuple(args.loss_type)
        self._divergence = (args.f_divergence_type, str(args.f_alpha_divergence_coef))
        self._weighs, self._precomputed = args.use_weighting, args.precompute_ref_log_probs
        numbers = {name: getattr(args, name) for name in ("beta", "label_smoothing", "discopop_tau", "ld_alpha")}
        numbers["loss_weights"] = args.loss_weights or [1.0] * len(self._types)
        for name, value in numbers.items():
            tensor = None if value is None else torch.tensor(value, dtype=torch.promote_types(dtype, torch.float32))
            self.register_buffer(name, tensor, persistent=False)

    def forward(self, log_probs: Tensor, reference: Tensor, mask: Tensor, squares: Tensor | None) -> PairScores:
        """Compute the loss.

        Args:
            log_probs: Of the token after each one, 0 outside of completions, [2 n, T]: the chosen and the rejected row
                of each pair.
            reference: Likewise under the reference.
            mask: Whether a token is of a completion, [2 n, T].
            squares: Logarithms of the sums of the squared probabilities, as `log_probs`, if pairs are weighed.
        """
        shifted = shifted_mask(mask)
        chosen, rejected = sequence_log_probs(log_probs, shifted, self.ld_alpha)
        ref_chosen, ref_rejected = sequence_log_probs(reference, shifted, self.ld_alpha)
        if self._precomputed:  # TRL keeps them in a column of this type
            ref_chosen, ref_rejected = ref_chosen.float(), ref_rejected.float()
        kind, alpha = self._divergence
        tokens = mask.sum(1).clamp(min=1)
        pairs = Pairs(
            *(chosen, rejected, ref_chosen, ref_rejected),
            divergence_scores(kind, chosen - ref_chosen, float(alpha)),
            divergence_scores(kind, rejected - ref_rejected, float(alpha)),
            *(tokens[::2], tokens[1::2], -log_probs[::2].sum() / shifted[::2].sum()),
            *(self.beta, self.label_smoothing, self.discopop_tau),
        )
        losses = torch.stack([LOSSES[each](pairs) for each in self._types])
        if self._weighs and squares is not None:
            losses = losses * _weights(log_probs.detach(), squares, shifted)
        loss = (losses.mean(1) * self.loss_weights).sum()
        rewards = self.beta * pairs.chosen_ratios.detach(), self.beta * pairs.rejected_ratios.detach()
        return PairScores(loss, chosen, rejected, *rewards)


def shifted_mask(mask: Tensor) -> Tensor:
    """Whether the token after each one is of a completion, [N, T]."""
    return F.pad(mask, (0, 1))[:, 1:]


def _weights(log_probs: Tensor, squares: Tensor, mask: Tensor) -> Tensor:
    """Weights of the pairs by the probability of both completions (WPO, arXiv 2406.11827), [n]."""
    means = ((log_probs - squares) * mask).sum(1) / mask.sum(1).clamp(min=1)
    return torch.exp(means[::2]) * torch.exp(means[1::2])


@dataclass(frozen=True)
class Pairs:
    """Pairs of a batch, [n] each, and the numbers of their trial, scalars.

    Args:
        chosen: Summed log-probabilities of the chosen completions under the model.
        rejected: Likewise of the rejected ones.
        ref_chosen: Likewise of the chosen ones under the reference.
        ref_rejected: Likewise of the rejected ones.
        chosen_scores: f-divergence scores of the chosen completions.
        rejected_scores: Likewise of the rejected ones.
        chosen_tokens: Tokens of the chosen completions.
        rejected_tokens: Likewise of the rejected ones.
        chosen_loss: Negative mean log-probability of all tokens of chosen completions, a scalar.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    chosen_scores: Tensor
    rejected_scores: Tensor
    chosen_tokens: Tensor
    rejected_tokens: Tensor
    chosen_loss: Tensor
    beta: Tensor
    label_smoothing: Tensor
    tau: Tensor

    @property
    def chosen_ratios(self) -> Tensor:
        """Log-ratios of model and reference of the chosen completions."""
        return self.chosen - self.ref_chosen

    @property
    def rejected_ratios(self) -> Tensor:
        """Log-ratios of model and reference of the rejected completions."""
        return self.rejected - self.ref_rejected

    @property
    def delta(self) -> Tensor:
        """Difference of the scores."""
        return self.chosen_scores - self.rejected_scores

    @property
    def mean_delta(self) -> Tensor:
        """Difference of the scores per token."""
        return self.chosen_scores / self.chosen_tokens - self.rejected_scores / self.rejected_tokens


def sequence_log_probs(log_probs: Tensor, mask: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
    """Log-probabilities of the chosen and of the rejected completions, [n] each.

    Args:
        log_probs: Of each token, 0 outside of completions, [2 n, T]; the rows of a pair follow one another.
        mask: Whether a token is of a completion, likewise.
        tail: Weight of the tokens beyond the length of the shorter completion of the pair (`ld_alpha`).
    """
    if tail is None:
        sums = log_probs.sum(1)
    else:
        place = mask.cumsum(1)
        shared = mask.sum(1).view(-1, 2).amin(1).repeat_interleave(2).unsqueeze(1)
        near, far = (place > 0) & (place <= shared), place > shared
        sums = (log_probs * near).sum(1) + tail * (log_probs * far).sum(1)
    return sums[::2], sums[1::2]


def divergence_scores(kind: str, ratios: Tensor, alpha: float) -> Tensor:
    """f'(t) of an f-divergence at t = exp(ratios), up to constants (f-DPO, arXiv 2309.16240)."""
    if kind == "forward_kl":
        return 1 - torch.exp(-ratios)
    if kind == "js_divergence":
        return math.log(2) + F.logsigmoid(ratios)
    if kind == "alpha_divergence" and abs(alpha - 1.0) >= 1e-6:
        return (torch.exp(torch.clamp((alpha - 1.0) * ratios, max=80.0)) - 1.0) * (1.0 / (alpha - 1.0))
    return ratios


def _sigmoid(x: Pairs) -> Tensor:
    return -F.logsigmoid(x.beta * x.delta)


def _hinge(x: Pairs) -> Tensor:
    return torch.relu(1 - x.beta * x.delta)


def _ipo(x: Pairs) -> Tensor:
    return (x.mean_delta - 1 / (2 * x.beta)) ** 2


def _sigmoid_norm(x: Pairs) -> Tensor:
    return -F.logsigmoid(x.beta * x.mean_delta)


def _robust(x: Pairs) -> Tensor:
    clean = -(1 - x.label_smoothing) * F.logsigmoid(x.beta * x.delta)
    flipped = -x.label_smoothing * F.logsigmoid(-x.beta * x.delta)
    return (clean - flipped) / (1 - 2 * x.label_smoothing)


def _exo_pair(x: Pairs) -> Tensor:
    epsilon, logits = x.label_smoothing.float(), x.beta * x.delta  # TRL takes the logarithms in float32
    chosen = torch.sigmoid(logits) * (F.logsigmoid(logits) - torch.log1p(-epsilon))
    return chosen + torch.sigmoid(-logits) * (F.logsigmoid(-logits) - torch.log(epsilon))


def _nca_pair(x: Pairs) -> Tensor:
    chosen, rejected = x.beta * x.chosen_ratios, x.beta * x.rejected_ratios
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def _bco_pair(x: Pairs) -> Tensor:
    return -F.logsigmoid(x.beta * x.chosen_ratios) - F.logsigmoid(-x.beta * x.rejected_ratios)


def _sppo_hard(x: Pairs) -> Tensor:
    return (x.chosen_ratios - 0.5 / x.beta) ** 2 + (x.rejected_ratios + 0.5 / x.beta) ** 2


def _aot(x: Pairs) -> Tensor:
    own, reference = (x.chosen - x.rejected).sort(0).values, (x.ref_chosen - x.ref_rejected).sort(0).values
    return _smoothed(x, own - reference)


def _aot_unpaired(x: Pairs) -> Tensor:
    return _smoothed(x, x.chosen_ratios.sort(0).values - x.rejected_ratios.sort(0).values)


def _smoothed(x: Pairs, delta: Tensor) -> Tensor:
    clean, flipped = -F.logsigmoid(x.beta * delta), -F.logsigmoid(-x.beta * delta)
    return clean * (1 - x.label_smoothing) + flipped * x.label_smoothing


def _apo_zero(x: Pairs) -> Tensor:
    return 1 - torch.sigmoid(x.beta * x.chosen_ratios) + torch.sigmoid(x.beta * x.rejected_ratios)


def _apo_down(x: Pairs) -> Tensor:
    chosen = torch.sigmoid(x.beta * x.chosen_ratios)
    return chosen + 1 - torch.sigmoid(x.beta * (x.chosen_ratios - x.rejected_ratios))


def _discopop(x: Pairs) -> Tensor:
    logits = x.delta * x.beta
    share = torch.sigmoid(logits / x.tau)
    return -F.logsigmoid(logits) * (1 - share) + torch.exp(-logits) * share


def _sft(x: Pairs) -> Tensor:
    return x.chosen_loss.expand_as(x.chosen)


LOSSES: Mapping[str, Callable[[Pairs], Tensor]] = MappingProxyType(
    {
        "sigmoid": _sigmoid,
        "hinge": _hinge,
        "ipo": _ipo,
        "exo_pair": _exo_pair,
        "nca_pair": _nca_pair,
        "robust": _robust,
        "bco_pair": _bco_pair,
        "sppo_hard": _sppo_hard,
        "aot": _aot,
        "aot_unpaired": _aot_unpaired,
        "apo_zero": _apo_zero,
        "apo_down": _apo_down,
        "discopop": _discopop,
        "sft": _sft,
        "sigmoid_norm": _sigmoid_norm,
    }
)
"""`loss_type` of DPOConfig -> the loss of each pair, [n]."""

_DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
_OF_SCORES = {"sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "sft"}
"""Losses in which an f-divergence has a meaning."""
_MIXED = {"sft", "aot", "aot_unpaired"}
"""Losses that mix the pairs of a batch."""


def check_losses(args: Any) -> None:
    """Check the fields of a DPOConfig that choose its loss.

    Raises:
        TaskError: A value is unknown, or DPOTrainer refuses the values together.
    """
    losses, weights = args.loss_type, args.loss_weights
    if unknown := [each for each in losses if each not in LOSSES]:
        raise TaskError(f"loss_type of DPOConfig must be of {', '.join(LOSSES)}, got {unknown[0]!r}")
    if weights is not None and len(weights) != len(losses):
        raise TaskError(f"loss_weights of DPOConfig must have a number for each of {losses}, got {weights}")
    if args.f_divergence_type not in _DIVERGENCES:
        raise TaskError(
            f"f_divergence_type of DPOConfig must be of {', '.join(_DIVERGENCES)}, got {args.f_divergence_type!r}"
        )
    if args.f_divergence_type != "reverse_kl" and (without := set(losses) - _OF_SCORES):
        raise TaskError(
            f"f_divergence_type={args.f_divergence_type!r} of DPOConfig has no meaning for loss_type={min(without)!r}; "
            "set f_divergence_type='reverse_kl'"
        )
    if "exo_pair" in losses and args.label_smoothing <= 0:
        raise TaskError(
            f"loss_type='exo_pair' of DPOConfig needs label_smoothing above 0, such as 1e-3, got {args.label_smoothing}"
        )
    if args.beta <= 0 and (divided := {"ipo", "sppo_hard"} & set(losses)):
        raise TaskError(
            f"loss_type={min(divided)!r} of DPOConfig divides by beta, which must be above 0, got {args.beta}"
        )
    if "robust" in losses and not 0 <= args.label_smoothing < 0.5:
        raise TaskError(
            "loss_type='robust' of DPOConfig divides by 1 - 2 label_smoothing; label_smoothing must be at least 0 and "
            f"below 0.5, got {args.label_smoothing}"
        )
    if args.use_weighting and (mixed := _MIXED & set(losses)):
        raise TaskError(
            f"use_weighting=True of DPOConfig weighs single pairs, and loss_type={min(mixed)!r} mixes those of a "
            "batch; remove one of them"
        )
