"""Normalisations of channels: those of all members are B·C channels of one."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse.rules.base import Layout, Rule, channel_major, merge_channels, split_channels
from shoal.fuse.rules.channelwise import by_samples
from shoal.fuse.stacked import NeedsMemberError, Stacked, count

__all__ = ["RULES"]


def _of_channels(normalise: Callable[..., Tensor], input: Any, columns: tuple[Any, ...], apart: bool, eps: Any) -> Any:
    """Apply a normalisation to [N, B*C, ...].

    Args:
        normalise: takes the input and the columns, plain.
        input: of members, [N, C, ...].
        columns: statistics and weights of channels, [C] or None.
        apart: samples do not touch each other; those of all members can be one batch if all share the columns.
        eps: declined if the members have one each, which no kernel takes.
    """
    if isinstance(eps, Stacked):
        return NotImplemented
    members = count((input, *columns))
    if members is None:  # the only thing of the members' own is a momentum
        return NotImplemented
    data = input.whole if isinstance(input, Stacked) else input.expand(members, *input.shape)
    if apart and not channel_major(data) and not any(isinstance(column, Stacked) for column in columns):
        return by_samples(normalise, input, *columns)
    out = normalise(merge_channels(data), *(_flat(column, members) for column in columns))
    return Stacked(split_channels(out, members))


def _flat(column: Any, members: int) -> Tensor | None:
    """[B, C] -> [B*C], a view, for statistics are written to; a shared [C] is repeated."""
    if column is None:
        return None
    return column.whole.view(-1) if isinstance(column, Stacked) else column.repeat(members)


def _refuse_shared(name: str, *statistics: Any) -> None:
    if any(isinstance(one, Tensor) and not isinstance(one, Stacked) for one in statistics):
        raise NeedsMemberError(f"{name} updates statistics that all members share")


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
        if input.numel() == input.shape[1]:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")

    def normalise(x: Tensor, mean: Any, var: Any, scale: Any, shift: Any) -> Tensor:
        if not training or not isinstance(momentum, Stacked) or mean is None:
            rate = 0.0 if isinstance(momentum, Stacked) else momentum
            return F.batch_norm(x, mean, var, scale, shift, training, rate, eps)
        now = torch.zeros_like(mean), torch.zeros_like(var)
        out = F.batch_norm(x, *now, scale, shift, True, 1.0, eps)  # a momentum of 1 gives the batch's own statistics
        rates = torch.tensor(momentum.numbers, dtype=mean.dtype, device=mean.device).unsqueeze(1)
        for running, of_batch in zip((mean, var), now, strict=True):
            running.view(len(rates), -1).lerp_(of_batch.view(len(rates), -1), rates)
        return out

    return _of_channels(normalise, input, (running_mean, running_var, weight, bias), not training, eps)


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

    return _of_channels(normalise, input, (running_mean, running_var, weight, bias), True, eps)


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

    return _of_channels(normalise, input, (weight, bias), True, eps)


RULES = (
    Rule.direct(_batch_norm, F.batch_norm, gives=Layout.CHANNEL_MAJOR),
    Rule.direct(_instance_norm, F.instance_norm, gives=Layout.CHANNEL_MAJOR),
    Rule.direct(_group_norm, F.group_norm, torch.group_norm, gives=Layout.CHANNEL_MAJOR),
)
