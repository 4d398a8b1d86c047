"""Members of one array whose steps have different numbers of batches: eager, captured and compiled as alone."""

import copy
from typing import Any

import pytest
import torch
from graphs_on_cpu import graphs
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
@pytest.mark.parametrize("mode", ["eager", "captured", "recorded", "in turns"])
def test_each_member_as_alone(mode: str, kind: str, mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = graphs(monkeypatch) if mode == "recorded" else None
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
    if recorded is not None:
        assert recorded.replays == len(DATA) - BEGINS
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


def test_the_fastest_mode_is_found_by_runs_of_batches() -> None:
    passes = 3
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
    for _ in range(passes):
        for number in range(BATCHES):
            step(given(number))
            modes.append(step.last_mode)
    assert modes.index("compiled") % 6 == 0, "all steps begin where it is compiled"
    assert step.mode == modes[-1] == "compiled"
    for b, model in enumerate(others):
        update = optimizer("adamw", model, b)
        for _ in range(passes):
            train_alone(model, update, b)
        for found, parameter in zip(array.members[b].parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter, rtol=1e-9, atol=1e-12)


class Longer(nn.Module):
    """Has a layer that only batches of three samples reach, if it is asked for."""

    def __init__(self, more: bool) -> None:
        super().__init__()
        self.first, self.more, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        if not more:
            self.more.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).tanh()
        out: Tensor = self.last(self.more(x).tanh() if len(x) == 3 else x)
        return out


@pytest.mark.parametrize("more", [False, True], ids=["the same layers", "a further layer"])
@pytest.mark.parametrize("sizes", [(2, 3), (1, 2)])
@pytest.mark.parametrize("lowering", ["kernels", "elementwise"])
def test_batches_of_other_shapes_run_eagerly_in_between(sizes: tuple[int, int], lowering: Any, more: bool) -> None:
    a_pass, count = 4, 20
    made = torch.Generator().manual_seed(1)
    rows = [3 if n % a_pass == a_pass - 1 else 5 for n in range(count)]
    data = [torch.randn(n, 4, dtype=torch.float64, generator=made) for n in rows]

    def ends(number: int, size: int) -> bool:
        return (number % a_pass + 1) % size == 0 or number % a_pass + 1 == a_pass

    def steps(number: int) -> MemberSteps:
        return MemberSteps(
            data[number],
            torch.tensor([1 / size for size in sizes], dtype=torch.float64),
            torch.tensor([number % a_pass % size == 0 for size in sizes]),
            torch.tensor([ends(number, size) for size in sizes]),
        )

    torch.manual_seed(0)
    first = Longer(more).double()
    array = fuse([copy.deepcopy(first) for _ in sizes])
    optimizers = [torch.optim.AdamW([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in array.members]
    fused = fuse_optimizers(optimizers, array, lowering=lowering)
    step, captured, taken = TrainingStep(array, fused, loss, ("eager",)), None, 0
    for number in range(count):
        if number == a_pass + 1:
            captured = CapturedStep(array, fused, loss, steps(0), compiling=False)
        if captured is not None and captured.fits(steps(number)):
            captured(steps(number))
            taken += 1
        else:
            step(steps(number))
    assert taken > 5
    for size, member in zip(sizes, array.members, strict=True):
        model = copy.deepcopy(first)
        update = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
        for number, x in enumerate(data):
            (loss(model, x) / size).backward()
            if ends(number, size):
                update.step()
                update.zero_grad()
        for found, parameter in zip(member.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter, rtol=1e-9, atol=1e-12)
