"""Every LR scheduler of torch drives its member alone, as it would without the array."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from optim_twins import Twins
from torch.optim import SGD, Adam, Optimizer, lr_scheduler

Make = Callable[[Optimizer, int], Any]

SCHEDULERS: dict[str, Make] = {
    "LambdaLR": lambda o, b: lr_scheduler.LambdaLR(o, lambda n: 1 / (n + b + 1)),
    "MultiplicativeLR": lambda o, b: lr_scheduler.MultiplicativeLR(o, lambda n: 0.9 - 0.1 * b),
    "StepLR": lambda o, b: lr_scheduler.StepLR(o, 2 + b, gamma=0.5),
    "MultiStepLR": lambda o, b: lr_scheduler.MultiStepLR(o, [1 + b, 4], gamma=0.5),
    "ConstantLR": lambda o, b: lr_scheduler.ConstantLR(o, 0.5, total_iters=2 + b),
    "LinearLR": lambda o, b: lr_scheduler.LinearLR(o, 0.25, total_iters=3 + b),
    "ExponentialLR": lambda o, b: lr_scheduler.ExponentialLR(o, 0.9 - 0.1 * b),
    "PolynomialLR": lambda o, b: lr_scheduler.PolynomialLR(o, total_iters=4 + b, power=2),
    "CosineAnnealingLR": lambda o, b: lr_scheduler.CosineAnnealingLR(o, T_max=4 + b),
    "CosineAnnealingWarmRestarts": lambda o, b: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=2 + b),
    "CyclicLR": lambda o, b: lr_scheduler.CyclicLR(o, 0.01, 0.1 * (b + 1), step_size_up=2),
    "OneCycleLR": lambda o, b: lr_scheduler.OneCycleLR(o, 0.1 * (b + 1), total_steps=9),
    "ReduceLROnPlateau": lambda o, b: lr_scheduler.ReduceLROnPlateau(o, patience=b, factor=0.5),
    "SequentialLR": lambda o, b: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2 + b]
    ),
    "ChainedScheduler": lambda o, b: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, total_iters=2), lr_scheduler.ExponentialLR(o, 0.9 - 0.1 * b)]
    ),
}

OPTIMIZERS: dict[str, Callable[[Any, int], Optimizer]] = {
    "sgd": lambda model, b: SGD(model.parameters(), lr=0.1 * (b + 1), momentum=0.9),
    "adam": lambda model, b: Adam(model.parameters(), lr=0.1 * (b + 1)),
}


def test_the_table_is_complete() -> None:
    public = set(lr_scheduler.__all__) - {"LRScheduler", "SWALR"}
    assert public <= set(SCHEDULERS)


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("lowering", ["kernels", "elementwise"])
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers(make: Make, lowering: Any, optimizer: Callable[[Any, int], Optimizer]) -> None:
    twins = Twins(optimizer, 3, lowering=lowering)
    ours = [make(own, b) for b, own in enumerate(twins.own)]
    theirs = [make(alone, b) for b, alone in enumerate(twins.optimizers)]
    apart = False
    for n in range(8):
        twins.step()
        for scheduler in (*ours, *theirs):
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(abs(n - 2.0))
            else:
                scheduler.step()
        twins.check()
        apart |= len({own.param_groups[0]["lr"] for own in twins.own}) == 3
    assert apart, "each member is to have a rate of its own"
    assert twins.fused.version == 1


def test_weight_averaging_schedule() -> None:
    twins = Twins(OPTIMIZERS["sgd"], 2)
    schedulers = [
        torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.5, anneal_epochs=3)
        for optimizer in (*twins.own, *twins.optimizers)
    ]
    for _ in range(4):
        twins.step()
        for scheduler in schedulers:
            scheduler.step()
    twins.check()
