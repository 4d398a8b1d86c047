"""State that models keep in plain attributes, and changes of it in the members of an array."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from twins import build, close, compare

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.step import TrainingStep

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.linear(x) * self.calls


class Remembering(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.last = torch.zeros(6, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x + self.last)
        self.last = out.detach()
        return out


def turns(array: ModelArray) -> list[Tensor]:
    """At once and one after another, by turns."""
    results = []
    for each_alone in (0, 1, 0, 0, 1):
        fn: Callable[..., Any] = lambda model, x: model(x)  # noqa: E731
        results.append(array.map(fn, X) if not each_alone else torch.stack([fn(member, X) for member in array.members]))
    return results


@pytest.mark.parametrize("kind", [Counting, Remembering])
def test_state_in_attributes_is_the_members_own_fused_or_alone(kind: type[nn.Module]) -> None:
    models, twins = build(kind, 3), build(kind, 3)
    for result in turns(fuse(models)):
        compare(result, [twin(X) for twin in twins])
    survivor = fuse(models).select([2])
    compare(survivor(X), [twins[2](X)])


def test_what_is_set_in_the_members_is_followed() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.BatchNorm1d(4), nn.LeakyReLU(0.1), nn.Linear(4, 2))

    models, twins = build(make, 3), build(make, 3)
    array = fuse(models)
    compare(array(X), [twin(X) for twin in twins])
    for model in (*models, *twins):
        model[0].eval()
        model[1].negative_slope = 0.7
    compare(array(X), [twin(X) for twin in twins])
    models[1][1].negative_slope = 0.2
    with pytest.raises(FusionError, match=r"members 0 and 1 now differ in '1.negative_slope'; fuse them"):
        several(array)


def several(array: ModelArray) -> None:
    """Members are looked at by turns."""
    for _ in range(3):
        array(X)


def test_own_numbers_that_are_changed_in_the_members_are_followed() -> None:
    models, twins = ([nn.Sequential(nn.Linear(4, 2), nn.LeakyReLU(0.1 * b)).double() for b in range(3)] for _ in "ab")
    for model, twin in zip(models, twins, strict=True):
        twin.load_state_dict(model.state_dict())
    array = fuse(models)
    array(X)
    for b, (model, twin) in enumerate(zip(models, twins, strict=True)):
        model[1].negative_slope = twin[1].negative_slope = 0.5 + b
    compare(array(X), [twin(X) for twin in twins])


class Centred(nn.Module):
    """It moves a frozen parameter, as teachers and centres of self-supervised training do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.centre = nn.Parameter(torch.zeros(3), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        with torch.no_grad():
            self.centre.mul_(0.9).add_(0.1 * out.mean(0))
        return out - self.centre


def centred() -> nn.Module:
    model = Centred()
    model.centre.requires_grad_(False)
    return model


def frozen_alike(members: int) -> list[nn.Module]:
    models = build(centred, members)
    for model in models:
        nn.init.constant_(model.centre, 1.0)
    return models


@pytest.mark.parametrize("members", [1, 3])
def test_a_frozen_parameter_that_is_written_to_becomes_the_members_own(members: int) -> None:
    models, twins = frozen_alike(members), frozen_alike(members)
    array = fuse(models)
    assert len(list(array.shared_parameters())) == (members > 1)
    for _ in range(3):
        compare(array(X), [twin(X) for twin in twins])
    for model, twin in zip(models, twins, strict=True):
        close(model.centre, twin.centre, "centre")


def test_members_that_write_to_what_is_kept_once_are_refused() -> None:
    array = fuse(frozen_alike(2))
    optimizer = fuse_optimizers([torch.optim.SGD(model.parameters(), 0.1) for model in array.members], array)
    step = TrainingStep(array, optimizer, lambda model, x: model(x).square().mean(), ("plain",))
    with pytest.raises(FusionError, match="'centre' is frozen and kept once for all members, and a member has changed"):
        step(X)
