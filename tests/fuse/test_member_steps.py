"""Members of one array whose steps have different numbers of batches: eager, captured and compiled as alone."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shoal.fuse.api import fuse
from shoal.fuse.backward import MemberSteps
from shoal.fuse.capture import CapturedStep
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.step import TrainingStep

SIZES = [1, 2, 3, 2]
"""Batches of a step, of each member."""

BATCHES = 24
BEGINS = 3
"""Number of the batch from which the captured step is used: each member has taken a step, and some go on."""

NORMS = [0.05, float("inf"), 0.5, 0.05]
DATA = torch.randn(BATCHES, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """Members of two kinds of blocks, one of which runs member by member."""

    def __init__(self, wide: bool) -> None:
        super().__init__()
        self.first = nn.Linear(4, 3)
        self.block = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 3)) if wide else nn.Linear(3, 3)
        self.frozen = nn.Linear(3, 2).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.frozen(self.block(self.first(x)).tanh())
        return out


def models(mixed: bool) -> list[Model]:
    torch.manual_seed(0)
    made = [Model(mixed and b == 2).double() for b in range(len(SIZES))]
    for each in made[1:]:
        each.frozen.load_state_dict(made[0].frozen.state_dict())
    return made


def loss(model: Any, x: Tensor) -> Tensor:
    value: Tensor = model(x).square().mean()
    return value


def optimizer(kind: str, model: nn.Module, b: int) -> torch.optim.Optimizer:
    trained = [each for each in model.parameters() if each.requires_grad]
    if kind == "sgd":
        return torch.optim.SGD(trained, lr=0.1 * (b + 1), momentum=0.9, dampening=0.2)
    return {"adamw": torch.optim.AdamW, "nadam": torch.optim.NAdam}[kind](trained, lr=0.01 * (b + 1))


def train_alone(model: nn.Module, update: torch.optim.Optimizer, b: int) -> None:
    size = SIZES[b]
    for number, x in enumerate(DATA):
        (loss(model, x) / size).backward()
        if (number + 1) % size == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), NORMS[b])
            update.step()
            update.zero_grad()


def given(number: int) -> MemberSteps:
    return MemberSteps(
        DATA[number],
        torch.tensor([1 / size for size in SIZES], dtype=torch.float64),
        torch.tensor([number % size == 0 for size in SIZES]),
        torch.tensor([(number + 1) % size == 0 for size in SIZES]),
    )


@pytest.mark.parametrize("mixed", [False, True], ids=["alike", "partial"])
@pytest.mark.parametrize("kind", ["sgd", "adamw", "nadam"])
@pytest.mark.parametrize("mode", ["eager", "captured", "in turns"])
def test_each_member_as_alone(mode: str, kind: str, mixed: bool) -> None:
    own, others = models(mixed), models(mixed)
    array = fuse(own, strict=False)
    assert array.partial == mixed
    fused = fuse_optimizers([optimizer(kind, model, b) for b, model in enumerate(own)], array)
    step = TrainingStep(array, fused, loss, ("eager",), max_norm=NORMS)
    taken: Any = step
    for number in range(len(DATA)):
        if number == BEGINS and mode != "eager":
            norms = torch.tensor(NORMS, dtype=torch.float64)
            taken = CapturedStep(array, fused, loss, given(0), compiling=False, max_norms=norms)
        captured = number >= BEGINS and not (mode == "in turns" and number % 5 < 2)
        if captured and mode != "eager":
            assert taken.fits(given(number))
        losses = (taken if captured else step)(given(number))
        assert losses.shape == (len(SIZES),)
    alone = [optimizer(kind, model, b) for b, model in enumerate(others)]
    for b, model in enumerate(others):
        train_alone(model, alone[b], b)
        for parameter, found in zip(model.parameters(), array.members[b].parameters(), strict=True):
            torch.testing.assert_close(found, parameter, rtol=1e-9, atol=1e-12)
        expected, held = alone[b].state_dict()["state"], fused.members[b].state_dict()["state"]
        for place, entries in expected.items():
            for name, value in entries.items():
                torch.testing.assert_close(
                    torch.as_tensor(held[place][name]).double(), torch.as_tensor(value).double(), rtol=1e-9, atol=1e-12
                )


def test_they_are_compiled_in_the_middle_of_steps() -> None:
    own, others = models(False), models(False)
    array = fuse(own)
    fused = fuse_optimizers([optimizer("adamw", model, b) for b, model in enumerate(own)], array)
    now = 0.0

    def clock() -> float:
        """A clock by which compiled steps take a tenth of the time."""
        nonlocal now
        now += 0.03 if step.last_mode == "compiled" else 0.3
        return now

    step = TrainingStep(array, fused, loss, ("eager", "compiled"), lambda seconds: True, clock, max_norm=NORMS)
    modes = []
    for number in range(len(DATA)):
        step(given(number))
        modes.append(step.last_mode)
    first = modes.index("compiled")
    assert first < len(DATA) - 3
    assert any((first % size) for size in SIZES), "steps go on when it is compiled"
    assert step.mode == modes[-1] == "compiled"
    for b, model in enumerate(others):
        train_alone(model, optimizer("adamw", model, b), b)
        for found, parameter in zip(array.members[b].parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter, rtol=1e-9, atol=1e-12)
