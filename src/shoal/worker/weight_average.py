"""Exponential moving averages of trials' trained parameters (Task.ema)."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from shoal.worker.trial_runtime import TrialRuntime

__all__ = ["averaged", "update_averages"]


@torch.no_grad()
def update_averages(runtimes: Sequence[TrialRuntime]) -> None:
    """Count a training step in the average of each trial that has one."""
    for runtime in runtimes:
        if (decay := runtime.settings.decay) is None:
            continue
        parameters = _trained(runtime.model)
        for name in parameters.keys() - runtime.average.keys():  # all at the first step, later those unfrozen since
            runtime.average[name] = parameters[name].detach().clone()
        torch._foreach_lerp_([runtime.average[name] for name in parameters], [*parameters.values()], 1 - decay)


@contextmanager
def averaged(runtimes: Sequence[TrialRuntime]) -> Iterator[None]:
    """Within, the models of trials with an average have the averaged values; afterwards exactly their own."""
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
