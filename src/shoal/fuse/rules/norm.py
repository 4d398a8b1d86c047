"""Rules for norms: batch, instance and group norm over B*C channels, and layer norm with scale and shift per member."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.autotune import fastest
from shoal.fuse.rules.base import Layout, Rule, channel_major, merge_channels, split_channels, stacked_data
from shoal.fuse.rules.channelwise import by_samples
from shoal.fuse.shard import IndivisibleStepError, Shard, active_shard
from shoal.fuse.stacked import NeedsMemberError, Stacked, member_count

__all__ = ["RULES", "shard_batch_norm"]


def shard_batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    scale: Tensor | None,
    shift: Tensor | None,
    momentum: float,
    eps: float,
    shard: Shard,
) -> Tensor:
    """As `torch.nn.functional.batch_norm` in training, for the rows [N, C, ...] of a shard; other tensors are [C].

    With n values of a channel in the whole batch, x̂ = (x - mean) / √(var + ε), where mean and var come from sums over
    all shards. Backward, dx = w / √(var + ε) · (dy - Σdy / n - x̂ · Σ(dy · x̂) / n), where the two sums, which are also
    the gradients of shift and scale, are over all shards. `IndivisibleStepError` if n < 2.
    """
    mean, var, count = _statistics(x.detach(), shard)
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
    out: Tensor = _ShardBatchNorm.apply(x, mean, var, scale, shift, eps, count, shard)  # type: ignore[no-untyped-call]
    return out


def _statistics(x: Tensor, shard: Shard) -> tuple[Tensor, Tensor, int]:
    """Mean and biased variance of each channel over the whole batch, and the number of values, as tensors."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    local = x.numel() // x.shape[1]
    sums = torch.zeros(3, x.shape[1], dtype=torch.float64, device=x.device)
    if local:
        mean, var = (each.double() for each in _moments(x.to(dtype)))
        sums[0], sums[1], sums[2] = mean * local, (var + mean * mean) * local, local
    shard.all_reduce(sums)
    count = int(sums[2, 0])
    if count < 2:
        raise IndivisibleStepError(f"a batch norm has {count} values of a channel")
    mean, square = sums[:2] / count
    return mean.to(dtype), (square - mean * mean).clamp_min_(0).to(dtype), count


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of each channel; on a CPU by a kernel that takes a quarter of the time."""
    if x.device.type == "cpu":
        mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
    else:
        var, mean = torch.var_mean(x, (0, *range(2, x.dim())), correction=0)
    return mean, var


class _ShardBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        mean: Tensor,
        var: Tensor,
        scale: Tensor | None,
        shift: Tensor | None,
        eps: float,
        count: int,
        shard: Shard,
    ) -> Tensor:
        ctx.save_for_backward(x, mean, var, scale)
        ctx.constants = eps, count, shard, shift is not None
        return F.batch_norm(x, mean, var, scale, shift, False, 0.0, eps) if x.numel() else x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, mean, var, scale = ctx.saved_tensors
        eps, count, shard, shifted = ctx.constants
        if x.numel():
            dx, dscale, dshift = torch.ops.aten.native_batch_norm_backward(
                grad.contiguous(), x, scale, mean, var, None, None, False, eps, [True, True, True]
            )
        else:  # of a masked batch; the function would end the process
            dx, dscale, dshift = torch.zeros_like(x), torch.zeros_like(mean), torch.zeros_like(mean)
        sums = torch.stack([dshift, dscale]).double()
        shard.all_reduce(sums)
        mean_grad, mean_product = (sums / count).to(mean.dtype)
        inverse = (var + eps).rsqrt()
        factor = inverse if scale is None else inverse * scale
        slope = factor * inverse * mean_product
        offset = factor * mean_grad - slope * mean
        shape = (1, -1) + (1,) * (x.dim() - 2)
        dx -= torch.addcmul(offset.view(shape), x, slope.view(shape)).to(dx.dtype)
        return dx, None, None, dscale if scale is not None else None, dshift if shifted else None, None, None, None


_LARGE = 2**13
"""Number of elements of a member below which one run for all members is always faster than the loop."""


def _normalise_channels(
    normalise: Callable[..., Tensor], input: Any, columns: tuple[Any, ...], independent: bool, eps: Any
) -> Any:
    """Apply a normalisation to the channels of all members, [N, B*C, ...]."""
    if isinstance(eps, Stacked):
        return NotImplemented
    members = member_count((input, *columns))
    if members is None:  # members differ only in the momentum
        return NotImplemented
    data = stacked_data(input, members)
    if independent and not channel_major(data) and not any(isinstance(column, Stacked) for column in columns):
        return by_samples(normalise, input, *columns)
    out = normalise(merge_channels(data), *(_flat(column, members) for column in columns))
    return Stacked(split_channels(out, members))


def _flat(column: Any, members: int) -> Tensor | None:
    """[B, C] -> [B*C], as a view, because the kernel writes to statistics; a shared [C] is repeated."""
    if column is None:
        return None
    return column.whole.view(-1) if isinstance(column, Stacked) else column.repeat(members)


def _refuse_shared(name: str, *statistics: Any) -> None:
    if any(isinstance(one, Tensor) and not isinstance(one, Stacked) for one in statistics):
        raise NeedsMemberError(f"{name} updates statistics that all members share")


def _batch_norm_of_all(
    x: Tensor, mean: Any, var: Any, scale: Any, shift: Any, training: bool, rate: float, eps: float
) -> Tensor:
    """Batch norm of the channels of all members, [N, B*C, ...]."""
    if training and (shard := active_shard()) is not None:
        return shard_batch_norm(x, mean, var, scale, shift, rate, eps, shard)
    return F.batch_norm(x, mean, var, scale, shift, training, rate, eps)


def _batch_norm(
    func: Any,
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: Any = 1e-5,
) -> Any:
    if input.dim() < 2:
        return NotImplemented
    if training:
        _refuse_shared("batch_norm", running_mean, running_var)
        if input.numel() == input.shape[1] and active_shard() is None:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")

    def normalise(x: Tensor, mean: Any, var: Any, scale: Any, shift: Any) -> Tensor:
        if not training or not isinstance(momentum, Stacked) or mean is None:
            rate = 0.0 if isinstance(momentum, Stacked) else momentum
            return _batch_norm_of_all(x, mean, var, scale, shift, training, rate, eps)
        now = torch.zeros_like(mean), torch.zeros_like(var)
        out = _batch_norm_of_all(x, *now, scale, shift, True, 1.0, eps)  # of momentum 1: statistics of the batch
        rates = momentum.floats_like(mean).unsqueeze(1)
        for running, of_batch in zip((mean, var), now, strict=True):
            running.view(len(rates), -1).lerp_(of_batch.view(len(rates), -1), rates)
        return out

    return _normalise_channels(normalise, input, (running_mean, running_var, weight, bias), not training, eps)


def _instance_norm(
    func: Any,
    input: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: Any = 0.1,
    eps: Any = 1e-5,
) -> Any:
    if input.dim() < 3:
        return NotImplemented
    if isinstance(momentum, Stacked):
        if running_mean is not None and use_input_stats:
            return NotImplemented
        momentum = 0.0
    if use_input_stats:
        _refuse_shared("instance_norm", running_mean, running_var)

    def normalise(x: Tensor, mean: Any, var: Any, scale: Any, shift: Any) -> Tensor:
        return F.instance_norm(x, mean, var, scale, shift, use_input_stats, momentum, eps)

    return _normalise_channels(normalise, input, (running_mean, running_var, weight, bias), True, eps)


def _group_norm(
    func: Any,
    input: Any,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: Any = 1e-5,
    cudnn_enabled: bool = True,
) -> Any:
    if input.dim() < 2:
        return NotImplemented
    channels = input.shape[1]

    def normalise(x: Tensor, scale: Any, shift: Any) -> Tensor:
        return F.group_norm(x, num_groups * (x.shape[1] // channels), scale, shift, eps)

    return _normalise_channels(normalise, input, (weight, bias), True, eps)


def _at_once(x: Tensor, weight: Any, bias: Any, shape: Sequence[int], eps: float) -> Tensor:
    """Layer norm of all members; scale and shift broadcast to [B, 1, ..., *shape], and one of them may be None."""
    out = F.layer_norm(x, shape, eps=eps)
    if weight is None or bias is None:
        scaled: Tensor = out + bias if weight is None else out * weight
    else:
        scaled = torch.addcmul(bias, out, weight)
    return scaled.to(out.dtype)


def _loop(x: Tensor, weight: Tensor, bias: Tensor | None, shape: Sequence[int], eps: float) -> Tensor:
    """Layer norm of one member after another, each with its own scale and shift."""
    columns = [[None] * len(x) if t is None else t.reshape(len(x), *shape).unbind(0) for t in (weight, bias)]
    return torch.stack([F.layer_norm(own, shape, w, b, eps) for own, w, b in zip(x.unbind(0), *columns, strict=True)])


def _layer_norm(
    func: Any,
    input: Any,
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: Any = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    if isinstance(eps, Stacked):
        return NotImplemented
    data = input.whole if isinstance(input, Stacked) else input
    if not isinstance(weight, Stacked) and not isinstance(bias, Stacked):
        return Stacked(F.layer_norm(data, normalized_shape, weight, bias, eps))
    shape = tuple(normalized_shape)
    tensors = (data, _broadcast_shape(weight, input), _broadcast_shape(bias, input))
    own = isinstance(weight, Stacked) and (bias is None or isinstance(bias, Stacked)) and isinstance(input, Stacked)
    if not own or input.numel() < _LARGE:
        return Stacked(_at_once(*tensors, shape, eps))
    lowerings = {"at once": partial(_at_once, shape=shape, eps=eps), "loop": partial(_loop, shape=shape, eps=eps)}
    return Stacked(fastest("layer_norm", lowerings, tensors, (shape, eps)))


def _broadcast_shape(value: Any, like: Tensor) -> Any:
    """[B, *E] -> [B, 1, ..., *E], which broadcasts over the other axes; a shared value stays unchanged."""
    if not isinstance(value, Stacked):
        return value
    data = value.whole
    return data.view(len(data), *[1] * (like.dim() - value.dim()), *data.shape[1:])


RULES = (
    Rule.direct(_batch_norm, F.batch_norm, output_layout=Layout.CHANNEL_MAJOR),
    Rule.direct(_instance_norm, F.instance_norm, output_layout=Layout.CHANNEL_MAJOR),
    Rule.direct(_group_norm, F.group_norm, torch.group_norm, output_layout=Layout.CHANNEL_MAJOR),
    Rule((F.layer_norm, torch.layer_norm), {"at once": _at_once, "loop": _loop}, run=_layer_norm),
)
