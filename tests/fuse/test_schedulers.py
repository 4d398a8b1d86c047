"""Every LR scheduler of torch works on its member's optimizer as it does without an array."""

from collections.abc import Callable
from typing import Any

import pytest
from optim_twins import Twins, same
from torch.optim import SGD, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, lr_scheduler, swa_utils

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
    "CyclicLR": lambda o, b: lr_scheduler.CyclicLR(
        o, 0.01, 0.1 * (b + 1), step_size_up=4, base_momentum=0.5, max_momentum=0.9 - 0.1 * b
    ),
    "OneCycleLR": lambda o, b: lr_scheduler.OneCycleLR(o, 0.1 * (b + 1), total_steps=12, max_momentum=0.9 - 0.1 * b),
    "SWALR": lambda o, b: swa_utils.SWALR(o, swa_lr=0.5 / (b + 1), anneal_epochs=3 + b),
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

CYCLED: dict[str, Callable[[Any, int], Optimizer]] = {
    "sgd-nesterov": lambda model, b: SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda model, b: RMSprop(model.parameters(), lr=0.1, momentum=0.5 + 0.1 * b),
    **{
        cls.__name__.lower(): lambda model, b, cls=cls: cls(model.parameters(), lr=0.1, betas=(0.8 + 0.05 * b, 0.99))
        for cls in (AdamW, Adamax, NAdam, RAdam)
    },
}
"""Classes whose momentum, or β₁, a scheduler may change too."""


def test_the_table_is_complete() -> None:
    public = set(lr_scheduler.__all__) - {"LRScheduler"}
    assert public <= set(SCHEDULERS)


@pytest.mark.in_turns(7)
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("lowering", ["kernels", "elementwise"])
@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_schedulers(make: Make, lowering: Any, optimizer: Callable[[Any, int], Optimizer]) -> None:
    twins = Twins(optimizer, 3, lowering=lowering)
    ours = [make(own, b) for b, own in enumerate(twins.own)]
    theirs = [make(alone, b) for b, alone in enumerate(twins.optimizers)]
    apart = False
    for n in range(10):
        twins.step()
        for scheduler in (*ours, *theirs):
            if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau):
                scheduler.step(abs(n - 2.0))
            else:
                scheduler.step()
        apart |= len({own.param_groups[0]["lr"] for own in twins.own}) == 3
    twins.check()
    assert apart, "each member is to have a rate of its own"
    assert twins.fused.version == 1


@pytest.mark.parametrize("optimizer", CYCLED.values(), ids=CYCLED)
@pytest.mark.parametrize("name", ["CyclicLR", "OneCycleLR"])
def test_schedulers_of_momentum(name: str, optimizer: Callable[[Any, int], Optimizer]) -> None:
    twins = Twins(optimizer, 3)
    schedulers = [[SCHEDULERS[name](o, b) for b, o in enumerate(side)] for side in (twins.own, twins.optimizers)]
    seen = set()
    for _ in range(10):
        twins.step()
        for scheduler in (*schedulers[0], *schedulers[1]):
            scheduler.step()
        group = twins.own[1].param_groups[0]
        seen.add(group["betas"][0] if "betas" in group else group["momentum"])
    twins.check()
    assert len(seen) > 3, "the momentum is to change"


def test_averaged_models() -> None:
    """`AveragedModel` of a member is a copy of its own, which follows the member's weights."""
    twins = Twins(OPTIMIZERS["sgd"], 3)
    sides = (twins.array.members, twins.alone)
    averages = [[swa_utils.AveragedModel(model) for model in side] for side in sides]
    for _ in range(4):
        twins.step()
        for side, models in zip(averages, sides, strict=True):
            for average, model in zip(side, models, strict=True):
                average.update_parameters(model)
    for mine, other in zip(*averages, strict=True):
        same(mine.state_dict(), other.state_dict(), 1e-9, "average")
    twins.check()
