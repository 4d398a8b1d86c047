"""Batch norm of the rows of a shard by the statistics of the whole batch.

With n values of a channel in the whole batch, x̂ = (x - mean) / √(var + ε), where mean and var come from sums over all
shards. Backward, dx = w / √(var + ε) · (dy - Σdy / n - x̂ · Σ(dy · x̂) / n), where the two sums, which are also the
gradients of shift and scale, are over all shards.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.shard import IndivisibleStepError, Shard

__all__ = ["shard_batch_norm"]


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
    """As `torch.nn.functional.batch_norm` in training, for the rows of a shard.

    Args:
        x: Input of the shard's rows, [N, C, ...].
        running_mean: Running mean, [C], which is updated by the whole batch's; or None.
        running_var: Running variance, [C], or None.
        scale: Scale, [C], or None.
        shift: Shift, [C], or None.
        momentum: Weight of the batch in the running statistics.
        eps: Epsilon.
        shard: The shard.

    Raises:
        IndivisibleStepError: The whole batch has fewer than two values of a channel.
    """
    mean, var, count = _statistics(x.detach(), shard)
    if running_mean is not None and running_var is not None:
        running_mean.lerp_(mean.to(running_mean.dtype), momentum)
        running_var.lerp_((var * (count / (count - 1))).to(running_var.dtype), momentum)
    out: Tensor = _ShardBatchNorm.apply(x, mean, var, scale, shift, eps, count, shard)  # type: ignore[no-untyped-call]
    return out


def _statistics(x: Tensor, shard: Shard) -> tuple[Tensor, Tensor, int]:
    """Mean and biased variance of each channel over the whole batch, in the dtype of the computation, and the number of
    values of a channel, which may differ between rows."""
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
