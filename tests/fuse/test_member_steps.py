"""Members of one array whose steps have different numbers of batches: eager, captured and compiled as alone."""

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
"""Number of the batch from which the captured step is used: each member has taken a step, and some continue."""

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


def train_alone(model: nn.Module, update: torch.optim.Optimizer, b: int, norm: float) -> None:
    size = SIZES[b]
    for number, x in enumerate(DATA):
        (loss(model, x) / size).backward()
        if (number + 1) % size == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), norm)
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
        train_alone(model, alone[b], b, NORMS[b])
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
    fused = fuse_optimizers(
        [torch.optim.SGD(model.parameters(), lr=0.1 * (b + 1)) for b, model in enumerate(own)], array
    )
    now = 0.0

    def clock() -> float:
        """A clock by which compiled steps take a tenth of the time."""
        nonlocal now
        now += 0.03 if step.last_mode == "compiled" else 0.3
        return now

    step = TrainingStep(array, fused, loss, ("eager", "compiled"), lambda seconds: True, clock)
    modes = []
    for _ in range(passes):
        for number in range(BATCHES):
            step(given(number))
            modes.append(step.last_mode)
    assert modes.index("compiled") % 6 == 0, "all steps begin where it is compiled"
    assert step.mode == modes[-1] == "compiled"
    for b, model in enumerate(others):
        update = torch.optim.SGD(model.parameters(), lr=0.1 * (b + 1))
        for _ in range(passes):
            train_alone(model, update, b, float("inf"))
        for found, parameter in zip(array.members[b].parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter, rtol=1e-9, atol=1e-12)


class Gated(nn.Module):
    """A model with a layer that only batches of six samples use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.more, self.last = nn.Linear(4, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        out: Tensor = self.last(hidden + self.more(hidden) if len(x) == 6 else hidden.tanh())
        return out


@pytest.mark.parametrize(
    ("sizes", "pass_batches", "samples"),
    [
        ([2, 3], 4, [5, 5, 5, 5, 5, 5, 7, 7, 5, 5, 7, 7]),  # batches 5 to 7: captured, then eager with other counts
        ([2, 3], 6, [5, 5, 5, 5, 5, 5, 6, 6, 5, 6, 6, 5]),  # batch 8 ends a step, to which 6 has given more gradients
    ],
    ids=["counts", "parameters"],
)
def test_eager_steps_among_captured_ones(sizes: list[int], pass_batches: int, samples: list[int]) -> None:
    torch.manual_seed(0)
    own, others = ([Gated().double() for _ in sizes] for _ in range(2))
    for model, other in zip(own, others, strict=True):
        other.load_state_dict(model.state_dict())
    data = [torch.randn(count, 4, dtype=torch.float64) for count in samples]

    def place(number: int, size: int) -> tuple[float, bool, bool]:
        """Weight of a batch in a step, and whether it begins and ends it."""
        at = number % pass_batches
        last = min(pass_batches, at - at % size + size) - 1
        return 1 / (last - at + at % size + 1), at % size == 0, at == last

    array = fuse(own)
    fused = fuse_optimizers([torch.optim.AdamW(model.parameters(), 0.01) for model in own], array, lowering="kernels")
    eager, captured, modes = TrainingStep(array, fused, loss, ("eager",)), None, []
    for number, x in enumerate(data):
        weights, begins, ends = zip(*(place(number, size) for size in sizes), strict=True)
        batch = MemberSteps(x, torch.tensor(weights, dtype=torch.float64), torch.tensor(begins), torch.tensor(ends))
        if number == pass_batches - 2:
            captured = CapturedStep(array, fused, loss, batch, compiling=False)
        takes = captured if captured is not None and captured.fits(batch) else eager
        takes(batch)
        modes.append(takes is captured)
    assert True in modes[:-1]
    assert False in modes[modes.index(True) :]
    for b, (model, size) in enumerate(zip(others, sizes, strict=True)):
        update = torch.optim.AdamW(model.parameters(), 0.01)
        for number, x in enumerate(data):
            weight, _, ends = place(number, size)
            (loss(model, x) * weight).backward()
            if ends:
                update.step()
                update.zero_grad()
        for found, parameter in zip(array.members[b].parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(found, parameter, rtol=1e-9, atol=1e-12)


def test_parameters_without_an_optimizer_do_not_keep_a_captured_step_from_running() -> None:
    """Nobody clears their gradients, which count for nothing."""
    own = models(False)
    array = fuse(own)
    fused = fuse_optimizers([torch.optim.SGD(model.first.parameters(), lr=0.1) for model in own], array)
    TrainingStep(array, fused, loss, ("eager",))(given(0))
    assert CapturedStep(array, fused, loss, given(0), compiling=False).fits(given(1))
