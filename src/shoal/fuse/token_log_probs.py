"""Log-probabilities of labels under a linear head over a large vocabulary, without the logits of all tokens.

Logits exist for one tile of rows at a time. The log-probability of a row is one number, so that its derivative by the
row of hidden states, W[y] - Σ_v p_v W[v], has as many elements as that row. While the head is frozen, the forward pass
computes it from the tile and keeps it in place of the hidden states; the backward pass multiplies. If the head trains,
the backward pass computes each tile again.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from shoal.core.errors import FusionError

__all__ = ["TokenStatistics", "token_log_probs", "token_statistics"]

_CPU_TILE = 2**23
"""Number of logits of a tile on a CPU."""

_TILE = 2**26
"""Number of logits of a tile on other devices, whose matrix products need more rows to be fast."""

_BLOCK = 4096
"""Number of words whose weights are in float32 at a time, where products of half precision run in float32."""


class TokenStatistics(NamedTuple):
    """Statistics of the distribution of each token, shape [...] as the labels; 0 where the label is ignored.

    Only `log_probs` has gradients.

    Args:
        log_probs: log p of the label.
        entropy: -Σ_v p_v log p_v, in nats.
        log_sum_squares: log Σ_v p_v².
        mean_logits: Mean of the logits over the vocabulary.
        is_top1: Whether the label is the most likely token.
    """

    log_probs: Tensor
    entropy: Tensor
    log_sum_squares: Tensor
    mean_logits: Tensor
    is_top1: Tensor


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> Tensor:
    """The log-probability of each label under the logits `hidden @ weight.T + bias`, in bounded memory.

    Equal to `-F.cross_entropy(logits, labels, reduction="none")`, with gradients to `hidden`, `weight` and `bias`. No
    more than `chunk` rows of logits exist at a time, in the forward or the backward pass. Under autocast the operands
    have the dtype of autocast; sums and statistics are float32. In an array, members with a common head are computed
    as one.

    Args:
        hidden: Hidden states, [..., H].
        weight: Weight of the head, [V, H].
        labels: Indices below V, or `ignore_index`, [...].
        bias: Bias of the head, [V].
        scale: Factor of the logits.
        softcap: Limit c of the logits, which become c · tanh(logits / c) after `scale`.
        ignore_index: Label of tokens that do not count; their log-probability is 0 and has no gradient.
        chunk: Number of rows of a tile of logits; by default 32 MiB of float32 logits on a CPU, and 256 MiB elsewhere.

    Returns:
        log p, [...], in float64 for float64, else in float32.

    Raises:
        FusionError: The shapes do not fit, a label is out of range (on a CPU), or `chunk` is not a positive integer.
    """
    _check(hidden, weight, labels, bias, chunk)
    given = (hidden, weight, labels, bias, scale, softcap)
    if has_torch_function(given):
        return handle_torch_function(
            token_log_probs,
            given,
            *(hidden, weight, labels),
            **_options(bias, scale, softcap, ignore_index, chunk),
        )
    log_probs, _ = _apply(hidden, weight, labels, bias, scale, softcap, ignore_index, chunk, False)
    return log_probs


def token_statistics(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    scale: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> TokenStatistics:
    """As `token_log_probs`, with other statistics of each token that metrics need; they have no gradients."""
    _check(hidden, weight, labels, bias, chunk)
    given = (hidden, weight, labels, bias, scale, softcap)
    if has_torch_function(given):
        return handle_torch_function(
            token_statistics,
            given,
            *(hidden, weight, labels),
            **_options(bias, scale, softcap, ignore_index, chunk),
        )
    log_probs, statistics = _apply(hidden, weight, labels, bias, scale, softcap, ignore_index, chunk, True)
    entropy, log_sum_squares, mean_logits, is_top1 = statistics.unbind(0)
    return TokenStatistics(log_probs, entropy, log_sum_squares, mean_logits, is_top1 > 0)


def _check(hidden: Tensor, weight: Tensor, labels: Tensor, bias: Tensor | None, chunk: int | None) -> None:
    fits = weight.dim() == 2 and hidden.shape == (*labels.shape, weight.shape[1]) and len(weight) > 0
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        given = [tuple(each.shape) for each in (hidden, weight, labels)]
        raise FusionError(
            "token_log_probs takes hidden states [..., H], a weight [V, H] and labels [...], got shapes "
            f"{given[0]}, {given[1]} and {given[2]}"
            + ("" if bias is None else f", and a bias [V], got {tuple(bias.shape)}")
        )
    if labels.dtype not in (torch.int64, torch.int32):
        raise FusionError(f"labels of token_log_probs are indices, of int64 or int32, got {labels.dtype}")
    if chunk is not None and (type(chunk) is not int or chunk < 1):
        raise FusionError(f"`chunk` of token_log_probs must be a whole number of rows above 0, got {chunk!r}")


def _check_range(labels: Tensor, words: int, ignore_index: int) -> None:
    """Check labels on a CPU; on other devices, where that would make the host wait, the kernels do it."""
    if labels.device.type == "cpu":
        wrong = labels[((labels < 0) | (labels >= words)) & (labels != ignore_index)]
        if len(wrong):
            raise FusionError(
                f"labels of token_log_probs must be below {words}, the number of rows of the weight, or be "
                f"ignore_index={ignore_index}, got {int(wrong[0])}; take the tokenizer of the model"
            )


def _options(bias: Any, scale: Any, softcap: Any, ignore_index: int, chunk: int | None) -> dict[str, Any]:
    return {"bias": bias, "scale": scale, "softcap": softcap, "ignore_index": ignore_index, "chunk": chunk}


def _apply(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    ignore_index: int,
    chunk: int | None,
    describe: bool,
) -> tuple[Tensor, Tensor]:
    """Log-probabilities, [...], and with `describe` the other statistics, [4, ...]."""
    kind = hidden.device.type
    rows = max(1, (_CPU_TILE if kind == "cpu" else _TILE) // len(weight)) if chunk is None else chunk
    mixed = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    if mixed and hidden.dtype != torch.float64:
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        bias = None if bias is None else bias.to(dtype)
    log_probs, statistics = _LogProbs.apply(  # type: ignore[no-untyped-call]
        hidden.reshape(-1, hidden.shape[-1]),
        weight,
        labels.reshape(-1),
        bias,
        (float(scale), 0.0 if softcap is None else float(softcap), ignore_index, rows),
        describe,
        torch.is_grad_enabled(),
    )
    return log_probs.view(labels.shape), statistics.view(len(statistics), *labels.shape) if describe else statistics


class _Head(NamedTuple):
    """A linear head, as the operators get it, and the products with it.

    Args:
        softcap: Limit of the logits, 0 for none.
        rows: Number of rows of a tile.
    """

    weight: Tensor
    bias: Tensor | None
    scale: float
    softcap: float
    ignore_index: int
    rows: int

    def tiles(self, labels: Tensor) -> Iterator[Tensor]:
        """Indices of the rows of each tile; on a CPU, where counting them waits for nothing, of those that count."""
        if labels.device.type == "cpu":
            counted = (labels != self.ignore_index).nonzero().squeeze(1)
        else:
            counted = torch.arange(len(labels), device=labels.device)
        return iter(torch.split(counted, self.rows))

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits, [n, V], of hidden states [n, H]."""
        if self._runs_in_float32():
            rows = hidden.float()
            logits = torch.cat([F.linear(rows, block.float()) for block in torch.split(self.weight, _BLOCK)], 1)
            logits = logits if self.bias is None else logits.add_(self.bias)
        else:
            logits = F.linear(hidden, self.weight, self.bias)
        if self.scale == 1.0 and not self.softcap:
            return logits
        logits = logits.to(_statistics_dtype(logits)).mul_(self.scale)
        return logits.div_(self.softcap).tanh_().mul_(self.softcap) if self.softcap else logits

    def before_scale_(self, slopes: Tensor, logits: Tensor) -> Tensor:
        """Turn derivatives by the logits into those by what the product returns, in place."""
        if self.softcap:
            slopes.mul_(1 - (logits / self.softcap).square_())
        return slopes if self.scale == 1.0 else slopes.mul_(self.scale)

    def times_weight(self, slopes: Tensor) -> Tensor:
        """[n, V] times the weight: [n, H], in the dtype of the weight."""
        if self._runs_in_float32():
            blocks = zip(torch.split(slopes, _BLOCK, 1), torch.split(self.weight, _BLOCK), strict=True)
            total = sum((slope @ block.float() for slope, block in blocks), slopes.new_zeros(()))
            return total.to(self.weight.dtype)
        return slopes.to(self.weight.dtype) @ self.weight

    def _runs_in_float32(self) -> bool:
        """Whether products run in float32: in half precision, a CPU without units for it takes many times as long."""
        return self.weight.device.type == "cpu" and self.weight.dtype in (torch.float16, torch.bfloat16)


class _LogProbs(torch.autograd.Function):
    """Log-probabilities of rows [N, H]; the passes are operators, which a trace of a step does not look into."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        bias: Tensor | None,
        numbers: tuple[float, float, int, int],
        describe: bool,
        tracked: bool,
    ) -> tuple[Tensor, Tensor]:
        of_hidden, of_weight, _, of_bias, *_ = ctx.needs_input_grad
        ctx.numbers = numbers
        ctx.trains_head = of_weight or of_bias
        keeps_slopes = tracked and of_hidden and not ctx.trains_head
        log_probs, statistics, slopes = _forward(hidden, labels, weight, bias, *numbers, describe, keeps_slopes)
        ctx.save_for_backward(*((hidden, labels, weight, bias) if ctx.trains_head else (slopes,)))
        ctx.mark_non_differentiable(statistics)
        return log_probs, statistics

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        if not ctx.trains_head:
            (slopes,) = ctx.saved_tensors
            return (slopes * gradient.unsqueeze(1)).to(slopes.dtype), *[None] * 6
        needed = ctx.needs_input_grad[0], ctx.needs_input_grad[1], ctx.needs_input_grad[3]
        given = _backward(gradient, *ctx.saved_tensors, *ctx.numbers, *needed)
        of_hidden, of_weight, of_bias = (each if wanted else None for each, wanted in zip(given, needed, strict=True))
        return of_hidden, of_weight, None, of_bias, None, None, None


def _statistics_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """Operators choose the dtypes of their products themselves."""
    return torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else nullcontext()


_HEAD = "Tensor weight, Tensor? bias, float scale, float softcap, int ignore_index, int rows"
"""Fields of `_Head` in the schema of an operator."""


@torch.library.custom_op(
    "shoal::token_log_probs",
    mutates_args=(),
    schema=f"(Tensor hidden, Tensor labels, {_HEAD}, bool describe, bool slopes) -> (Tensor, Tensor, Tensor)",
)
def _forward(hidden: Tensor, labels: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities, [N], with `describe` other statistics, [4, N], and with `slopes` their derivatives, [N, H]."""
    *head, describe, keeps_slopes = others
    found, statistics, slopes = results = _forward_results(hidden, describe, keeps_slopes)
    own = _Head(*head)
    _check_range(labels, len(own.weight), own.ignore_index)
    with _without_autocast(hidden.device):
        for index in own.tiles(labels):
            label = labels[index].unsqueeze(1)
            counted = label != own.ignore_index
            log_prob, rest, slope = _score(own, hidden[index], label.where(counted, 0), describe, keeps_slopes)
            found[index] = log_prob.where(counted, 0).squeeze(1)
            if rest is not None:
                statistics[:, index] = rest.where(counted.squeeze(1), 0)
            if slope is not None:
                slopes[index] = slope.where(counted, 0)
    return results


def _score(
    head: _Head, hidden: Tensor, label: Tensor, describe: bool, slopes: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Log-probabilities of a tile, [n, 1], other statistics, [4, n], and derivatives, [n, H], if wanted."""
    logits = head.logits(hidden)
    shares = F.log_softmax(logits, 1, dtype=_statistics_dtype(hidden))
    log_prob = shares.gather(1, label)
    rest = slope = None
    if describe:
        p = shares.exp()
        mean, is_top1 = logits.mean(1, dtype=p.dtype), (logits.argmax(1) == label.squeeze(1)).to(p.dtype)
        rest = torch.stack([-(p * shares).sum(1), p.square().sum(1).log(), mean, is_top1])
    if slopes:
        shares.exp_().neg_().scatter_add_(1, label, torch.ones_like(log_prob))
        slope = head.times_weight(head.before_scale_(shares, logits))
    return log_prob, rest, slope


def _forward_results(hidden: Tensor, describe: bool, slopes: bool) -> tuple[Tensor, Tensor, Tensor]:
    found = hidden.new_zeros(len(hidden), dtype=_statistics_dtype(hidden))
    return found, found.new_zeros((4, len(hidden)) if describe else 0), hidden.new_zeros(hidden.shape if slopes else 0)


@_forward.register_fake
def _(hidden: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _forward_results(hidden, *others[-2:])


@torch.library.custom_op(
    "shoal::token_log_probs_backward",
    mutates_args=(),
    schema=f"(Tensor gradient, Tensor hidden, Tensor labels, {_HEAD}, bool of_hidden, bool of_weight, bool of_bias) "
    "-> (Tensor, Tensor, Tensor)",
)
def _backward(gradient: Tensor, hidden: Tensor, labels: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by hidden states, weight and bias; empty where they are not wanted."""
    head, wanted = _Head(*others[:-3]), others[-3:]
    by_hidden, by_weight, by_bias = _backward_results(gradient, hidden, head.weight, *wanted)
    with _without_autocast(hidden.device):
        for index in head.tiles(labels):
            part = hidden[index]
            slopes = _slopes(head, part, labels[index].unsqueeze(1), gradient[index].unsqueeze(1))
            if wanted[0]:
                by_hidden[index] = head.times_weight(slopes)
            if wanted[1]:  # summed in float32, also for half precision, since there may be many tiles
                by_weight.addmm_(slopes.t(), part.to(slopes.dtype))
            if wanted[2]:
                by_bias += slopes.sum(0)
            del slopes  # before the next tile is made
    return by_hidden, by_weight.to(head.weight.dtype), by_bias.to(head.weight.dtype)


def _slopes(head: _Head, hidden: Tensor, label: Tensor, gradient: Tensor) -> Tensor:
    """Derivatives of the loss by what the product of a tile returns, [n, V]."""
    logits = head.logits(hidden)
    counted = label != head.ignore_index
    gradient = gradient.where(counted, 0)
    slopes = F.softmax(logits, 1, dtype=gradient.dtype).mul_(-gradient)
    slopes.scatter_add_(1, label.where(counted, 0), gradient)
    return head.before_scale_(slopes, logits)


def _backward_results(
    gradient: Tensor, hidden: Tensor, weight: Tensor, of_hidden: bool, of_weight: bool, of_bias: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        hidden.new_zeros(hidden.shape if of_hidden else 0),
        weight.new_zeros(weight.shape if of_weight else 0, dtype=gradient.dtype),
        weight.new_zeros(len(weight) if of_bias else 0, dtype=gradient.dtype),
    )


@_backward.register_fake
def _(gradient: Tensor, hidden: Tensor, labels: Tensor, weight: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    by_hidden, by_weight, by_bias = _backward_results(gradient, hidden, weight, *others[-3:])
    return by_hidden, by_weight.to(weight.dtype), by_bias.to(weight.dtype)
