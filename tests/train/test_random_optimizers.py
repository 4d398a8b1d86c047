"""An optimizer whose step draws random numbers draws the same ones in an array as alone."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from contract_samples import Small, trial, work
from torch import nn
from torch.optim import SGD

from shoal.core.array import Member

EPOCHS = 2


class Noisy(SGD):
    """SGD that adds noise to each parameter."""

    draw: Callable[[], float]

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(0.01 * type(self).draw())


class NumPyNoise(Noisy):
    draw = staticmethod(lambda: float(np.random.rand()))


class PythonNoise(Noisy):
    draw = staticmethod(lambda: random.random())


class Drawing(Small):
    def __init__(self, kind: type[Noisy]) -> None:
        self.kind = kind

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return self.kind(model.parameters(), lr=config["lr"])


@pytest.mark.parametrize("kind", [NumPyNoise, PythonNoise])
def test_each_trial_is_as_if_alone(kind: type[Noisy], tmp_path: Path) -> None:
    members = [Member(trial(number), 0, EPOCHS) for number in range(3)]
    together = work(Drawing(kind), tmp_path / "together", members)
    for each in members:
        number = each.trial.number
        alone = work(Drawing(kind), tmp_path / f"alone {number}", [each])
        mine = [report for report in together if report.trial == number]
        assert len(mine) == len(alone) == EPOCHS
        for one, other in zip(mine, alone, strict=True):
            assert dict(one.metrics) == pytest.approx(dict(other.metrics), rel=1e-9)
