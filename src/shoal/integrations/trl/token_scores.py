"""Scores of the next tokens under a causal language model: log-probabilities and statistics of the predictions."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.trainer_utils import unwrap_peft_model

__all__ = ["TokenScores", "token_scores"]


class TokenScores(NamedTuple):
    """Scores of the labels from the second on, [N, T - 1] each, 0 where a label is -100.

    All but `log_probs` are without gradients.
    """

    log_probs: Tensor
    labelled: Tensor
    """Whether there is a label."""
    statistics: "Statistics | None" = None


class Statistics(NamedTuple):
    """Statistics of the predicted distributions."""

    entropy: Tensor
    is_top1: Tensor
    """Whether the label is the most probable token."""
    mean_logits: Tensor
    log_sum_sq_probs: Tensor
    """log(sum_v p_v^2)."""


def token_scores(model: nn.Module, inputs: dict[str, Any], labels: Tensor, statistics: bool = False) -> TokenScores:
    """Score labels by the backbone of a model and its head, in float32 or better.

    Args:
        model: Causal language model, or a `PeftModel` of one.
        inputs: Arguments of the backbone, without labels.
        labels: Ids of the tokens, [N, T], or -100.
        statistics: Whether statistics of the predictions are wanted.
    """
    base: Any = unwrap_peft_model(model)
    hidden = base.base_model(**inputs, use_cache=False).last_hidden_state[:, :-1]
    labels = labels[:, 1:]
    labelled = labels != -100
    head = base.get_output_embeddings()
    logits = F.linear(hidden, head.weight, head.bias)
    logits = _transformed(logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits, base.config)
    log_p = logits.log_softmax(-1)
    log_probs = log_p.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1).masked_fill(~labelled, 0)
    if not statistics:
        return TokenScores(log_probs, labelled)
    with torch.no_grad():
        found = Statistics(
            entropy=-(log_p.exp() * log_p).sum(-1).masked_fill(~labelled, 0),
            is_top1=(logits.argmax(-1) == labels) & labelled,
            mean_logits=logits.mean(-1).masked_fill(~labelled, 0),
            log_sum_sq_probs=(2 * log_p).logsumexp(-1).masked_fill(~labelled, 0),
        )
    return TokenScores(log_probs, labelled, found)


def _transformed(logits: Tensor, config: Any) -> Tensor:
    """Logits as the model's own forward would scale and cap them."""
    text = config.get_text_config()
    if (scale := _scale(text)) != 1:
        logits = logits * scale
    cap = getattr(text, "final_logit_softcapping", None)
    return logits if cap is None else cap * torch.tanh(logits / cap)


def _scale(text: Any) -> float:
    for name in ("logit_scale", "output_multiplier", "lm_head_multiplier"):
        if (value := getattr(text, name, None)) is not None:
            return float(value)
    divisor = getattr(text, "logits_scaling", None)
    if divisor is None:
        return 1.0
    return float(divisor if text.model_type == "hyperclovax" else 1 / divisor)
