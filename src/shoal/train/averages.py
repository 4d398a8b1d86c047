"""Averages of parameters by `Task.ema`: kept after each step, and in the place of the parameters while validating."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shoal.train.trial_runtime import TrialRuntime

__all__ = ["averaged", "update_averages"]


@torch.no_grad()
def update_averages(runtimes: Sequence[TrialRuntime]) -> None:
    """Update the averages of the trials that have them after a training step."""
    for runtime in runtimes:
        if (ema_decay := runtime.settings.ema_decay) is None:
            continue
        parameters = _trained(runtime.model)
        for name in parameters.keys() - runtime.average.keys():  # at the first step all, later those unfrozen since
            runtime.average[name] = parameters[name].detach().clone()
        torch._foreach_lerp_([runtime.average[name] for name in parameters], [*parameters.values()], 1 - ema_decay)


@contextmanager
def averaged(runtimes: Sequence[TrialRuntime]) -> Iterator[None]:
    """Replace the parameters of trials with their averages within the context, and restore them exactly afterwards."""
    swapped: list[tuple[Tensor, Tensor]] = []
    with torch.no_grad():
        for runtime in runtimes:
            for name, average in runtime.average.items():
                parameter = runtime.model.get_parameter(name)
                swapped.append((parameter, parameter.detach().clone()))
                parameter.copy_(average)
    try:
        yield
    finally:
        with torch.no_grad():
            for averaged_one, own in swapped:
                averaged_one.copy_(own)


def _trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: each for name, each in model.named_parameters() if each.requires_grad}
