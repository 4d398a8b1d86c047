"""Members whose steps are skipped are as if nobody had called `step`; once all have state, it stays where it is."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from shoal.fuse.api import fuse
from shoal.fuse.optim.fused import fuse_optimizers

X = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
RATES = [0.01, 0.01, 0.02, 0.02]
SKIPPED = [{1, 2}, {0, 3}, {1}, {0, 1, 2, 3}, set(), {0}, {2, 3}, set()]

KINDS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "dampened momentum": lambda params, lr: torch.optim.SGD(params, lr, momentum=0.9, dampening=0.3),
    "adam": torch.optim.Adam,
    "nadam": torch.optim.NAdam,
    "adagrad": torch.optim.Adagrad,
    "one by one": torch.optim.ASGD,
}


@pytest.mark.parametrize("lowering", ["kernels", "elementwise"])
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_skipped_steps_change_nothing(kind: Any, lowering: Any) -> None:
    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double() for _ in range(4)]
    others = copy.deepcopy(models)
    array = fuse(models)
    optimizers = [kind(model.parameters(), lr=rate) for model, rate in zip(models, RATES, strict=True)]
    fused = fuse_optimizers(optimizers, array, lowering=lowering)
    alone = [kind(model.parameters(), lr=rate) for model, rate in zip(others, RATES, strict=True)]
    versions, begun = set(), set[int]()
    for skipped in SKIPPED:
        fused.zero_grad()
        array.map(lambda model: model(X).square().mean()).sum().backward()
        fused.step(skip=skipped)
        for b, (model, optimizer) in enumerate(zip(others, alone, strict=True)):
            optimizer.zero_grad()
            model(X).square().mean().backward()
            if b not in skipped:
                optimizer.step()
            for own, other in zip(array.members[b].parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(own, other, rtol=1e-12, atol=0)
            found, expected = fused.members[b].state_dict()["state"], optimizer.state_dict()["state"]
            for place in expected.keys() | found.keys():  # SGD without momentum has an entry of None
                theirs = {name: value for name, value in expected.get(place, {}).items() if value is not None}
                assert found.get(place, {}).keys() == theirs.keys(), (b, skipped)
                for name, value in theirs.items():
                    own = torch.as_tensor(found[place][name]).double()
                    torch.testing.assert_close(own, torch.as_tensor(value).double(), rtol=1e-12, atol=0)
        begun |= set(range(4)) - skipped
        if len(begun) == 4:
            versions.add(fused.version)
    assert len(versions) == 1
