"""Training steps of different arrays, in several threads at once, equal those of the same arrays alone."""

import random
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from threading import Barrier, Event
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils.checkpoint import checkpoint

from shoal.core.errors import FusionError
from shoal.fuse import autotune
from shoal.fuse.array import ModelArray
from shoal.fuse.beside import accompanied, beside
from shoal.fuse.clip import clip_grad_norm_
from shoal.fuse.generators import seed_again, seeded
from shoal.fuse.making import fuse
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers
from shoal.fuse.quiet import Hidden
from shoal.fuse.step import TrainingStep, Way

SECONDS = 20.0
"""After so long a thread that waits for another has hung."""
STEPS = 6
X = torch.randn(6, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.arange(6) % 4


pytestmark = pytest.mark.usefixtures("often")


class Dense(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(192, 7), nn.BatchNorm1d(7), nn.Dropout(0.3), nn.ReLU())
        self.append(nn.Linear(7, 4))


class Convolved(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(0.2), nn.MaxPool2d(2))
        self.extend([nn.Flatten(), nn.Linear(36, 4)])


class Noisy(nn.Module):
    """Numbers that are drawn member by member, a recurrent layer with masks, and a part that runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(24, 5, num_layers=2, dropout=0.3, batch_first=True)
        self.part = nn.Sequential(nn.Linear(5, 5), nn.Tanh())
        self.out = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lstm(x.transpose(1, 2).flatten(2))[0][:, -1]
        x = checkpoint(self.part, x + torch.randn_like(x), use_reentrant=False)
        return self.out(F.rrelu(x, training=True) + torch.rand(5))


class Asking(Dense):
    """Looks at a number, so that each member runs by itself."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out * 2 if float(out.detach().mean()) > 0 else out + torch.randn(4)


class Slow(nn.Module):
    """A function that only vmap's loop can do for all members, with a warning."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 192))

    def forward(self, x: Tensor) -> Tensor:
        return F.hardswish(torch.cdist(x.flatten(1), self.weight).renorm(2, 0, 3.0))


class Partial(nn.Module):
    """Its middle differs between members."""

    def __init__(self, b: int) -> None:
        super().__init__()
        kinds = [nn.Tanh(), nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5)), nn.GELU()]
        self.front, self.middle, self.out = nn.Linear(192, 5), kinds[b % 3], nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.middle(self.front(x.flatten(1))))


@dataclass(frozen=True)
class Lane:
    """What is trained.

    Args:
        model: of a member's number.
        optimizer: of a member's parameters and number.
        members: how many.
        samples: of the batch.
        way: to step; None: `map`, `backward`, gradients clipped, `step`.
    """

    model: Callable[[int], nn.Module]
    optimizer: Callable[[Any, float], Optimizer]
    members: int
    samples: int
    way: Way | None


LANES = {
    "dense": Lane(lambda b: Dense(), lambda p, b: Adam(p, 0.01 * (b + 1)), 4, 6, "eager"),
    "dense, serial": Lane(lambda b: Dense(), lambda p, b: SGD(p, 0.01, momentum=0.1 * b), 3, 5, "serial"),
    "dense, one": Lane(lambda b: Dense(), lambda p, b: AdamW(p, 0.02), 1, 4, "serial"),
    "conv": Lane(lambda b: Convolved(), lambda p, b: SGD(p, 0.1 / (b + 1), weight_decay=0.1), 3, 6, "eager"),
    "conv, clipped": Lane(lambda b: Convolved(), lambda p, b: RMSprop(p, 0.01), 2, 5, None),
    "noisy": Lane(lambda b: Noisy(), lambda p, b: Adam(p, 0.01), 2, 6, "eager"),
    "noisy, serial": Lane(lambda b: Noisy(), lambda p, b: SGD(p, 0.1), 3, 3, "serial"),
    "asking": Lane(lambda b: Asking(), lambda p, b: Adam(p, 0.01), 3, 6, "eager"),
    "slow": Lane(lambda b: Slow(), lambda p, b: SGD(p, 0.1), 2, 6, "eager"),
    "partial": Lane(Partial, lambda p, b: Adam(p, 0.01), 3, 4, "eager"),
    "torch's own": Lane(lambda b: Dense(), lambda p, b: torch.optim.Rprop(p, 0.01), 2, 6, "eager"),
}


class Running:
    """A lane in training."""

    def __init__(self, lane: Lane) -> None:
        models = []
        for b in range(lane.members):
            torch.manual_seed(b)
            models.append(lane.model(b).double())
        self.array: ModelArray = fuse(models, range(7, 7 + lane.members), strict=False)
        members = [lane.optimizer(list(m.parameters()), b) for b, m in enumerate(self.array.members)]
        self.optimizer: FusedOptimizer = fuse_optimizers(members, self.array)
        self._batch = (X[: lane.samples].clone(), Y[: lane.samples])
        self._step = None if lane.way is None else TrainingStep(self.array, self.optimizer, loss, (lane.way,))

    def step(self) -> Tensor:
        if self._step is not None:
            return self._step(self._batch)
        self.optimizer.zero_grad()
        losses = self.array.map(loss, self._batch)
        losses.sum().backward()
        clip_grad_norm_(self.array, 0.05)
        self.optimizer.step()
        return losses.detach()

    def state(self) -> list[Tensor]:
        return [tensor.clone() for member in self.array.members for tensor in member.state_dict().values()]


def loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def together(runs: list[Callable[[], Any]], steps: int) -> list[list[Any]]:
    """What each returns at every step; a step of one begins when the steps of all do."""
    barrier = Barrier(len(runs), timeout=SECONDS)

    def go(run: Callable[[], Any]) -> list[Any]:
        results = []
        with beside(threads=1, alone=1):
            for _ in range(steps):
                barrier.wait()
                results.append(run())
        return results

    with ThreadPoolExecutor(len(runs)) as pool:
        return [future.result(SECONDS) for future in [pool.submit(go, run) for run in runs]]


@pytest.mark.parametrize("alone_before", [0, 2], ids=["from the first step", "after two alone"])
def test_lanes_in_threads_equal_lanes_alone(alone_before: int) -> None:
    alone = [Running(lane) for lane in LANES.values()]
    expected = [[lane.step() for _ in range(alone_before + STEPS)] for lane in alone]
    lanes = [Running(lane) for lane in LANES.values()]
    first = [[lane.step() for _ in range(alone_before)] for lane in lanes]
    rest = together([lane.step for lane in lanes], STEPS)
    for name, wanted, got, mine, other in zip(
        LANES, expected, map(list.__add__, first, rest), lanes, alone, strict=True
    ):
        assert all(map(torch.equal, got, wanted)), name
        assert all(map(torch.equal, mine.state(), other.state())), name


def test_no_filter_of_warnings_is_left() -> None:
    """Though the thread that began first to do what torch warns of ends first."""
    first_is_in, second_is_in, first_is_out = Event(), Event(), Event()

    def doubled(entered: Event, until: Event) -> Callable[[Tensor], Tensor]:
        def function(x: Tensor) -> Tensor:
            if has_torch_function_unary(x):
                return handle_torch_function(function, (x,), x)
            entered.set()
            until.wait(SECONDS)
            return x * 2

        return function

    def run(function: Callable[[Tensor], Tensor], after: Event | None, end: Event) -> None:
        array = fuse([nn.Linear(2, 2), nn.Linear(2, 2)])
        if after is not None:
            after.wait(SECONDS)
        array.map(lambda model: function(model.weight))
        end.set()

    before = list(warnings.filters)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(run, doubled(first_is_in, second_is_in), None, first_is_out)
        second = pool.submit(run, doubled(second_is_in, first_is_out), first_is_in, Event())
        for future in (first, second):
            future.result(SECONDS)
    assert warnings.filters == before


def test_a_part_that_runs_again_leaves_generators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def seen(state: Tensor) -> None:
        raise AssertionError("torch's default generator is set")

    monkeypatch.setattr(torch, "set_rng_state", seen)
    array = fuse([Noisy().double() for _ in range(2)], [1, 2])
    losses = array.map(lambda model, x: checkpoint(model.part, x, use_reentrant=False).sum(), torch.ones(3, 5).double())
    losses.sum().backward()
    assert array.members[0].part[0].weight.grad is None
    assert all(parameter.grad is not None for name, parameter in array.named_parameters() if ".part." in name)


def test_a_warning_is_hidden_until_the_last_thread_leaves() -> None:
    hidden = Hidden("of no interest")
    outer, inner = hidden(), hidden()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    warnings.warn("of no interest to anyone", UserWarning, stacklevel=1)
    inner.__exit__(None, None, None)
    with pytest.raises(UserWarning, match="of no interest"):
        warnings.warn("of no interest to anyone", UserWarning, stacklevel=1)


@pytest.mark.parametrize("name", ["dense, serial", "asking"])
def test_members_leave_generators_to_who_draws_meanwhile(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[tuple[float, float]] = []
    lane = Running(LANES[name])
    for _ in range(2):
        lane.step()

    def numbers() -> None:
        drawn.append((random.random(), float(np.random.rand())))

    with ThreadPoolExecutor(1) as elsewhere:
        forward = Dense.forward

        def meanwhile(model: Dense, x: Tensor) -> Tensor:
            elsewhere.submit(numbers).result(SECONDS)
            return forward(model, x)

        monkeypatch.setattr(Dense, "forward", meanwhile)
        with beside(threads=1, alone=1):
            lane.step()
    assert len(set(drawn)) == LANES[name].members


def test_a_member_that_draws_at_last_is_watched() -> None:
    """Its numbers are its own, though it has drawn none before: another thread may be at torch's generators."""

    def late(drawing: list[bool]) -> Callable[[], Tensor]:
        array = fuse([nn.Linear(3, 3).double() for _ in range(2)], [1, 2])
        with torch.no_grad():
            for parameter in array.parameters():
                parameter.fill_(0.5)
        members = [SGD(m.parameters(), lr=0.1) for m in array.members]
        x = torch.ones(2, 3, dtype=torch.float64)
        step = TrainingStep(
            array,
            fuse_optimizers(members, array),
            lambda model, x: (model(x) + (torch.randn(3) if drawing else 0)).square().mean(),
            ("serial",),
        )
        return lambda: step(x)

    results = []
    for inside in (False, True):
        drawing: list[bool] = []
        step = late(drawing)
        step()
        drawing.append(True)
        before = torch.get_rng_state()
        if inside:
            with beside(threads=1, alone=1):
                results.append(step())
            assert torch.equal(torch.get_rng_state(), before)
        else:
            results.append(step())
    assert torch.equal(*results)


def test_generators_are_not_seeded_again_beside_others() -> None:
    with seeded(3, torch.device("cpu")), beside(threads=1, alone=1):
        drawn = random.random()
        seed_again()
        assert random.random() != drawn


def test_nothing_is_measured_beside_others(tmp_path: Any) -> None:
    ran: list[str] = []
    ways = {name: lambda x, name=name: (ran.append(name), x * 2)[1] for name in "ab"}
    with autotune.on(tmp_path / "lowerings.jsonl"):
        with beside(threads=1, alone=1):
            autotune.fastest("double", ways, [X])
        assert ran == ["a"]
        autotune.fastest("double", ways, [X])
        assert {*ran} == {"a", "b"}


def test_what_was_found_alone_holds_beside_others(tmp_path: Any) -> None:
    ran: list[str] = []

    def way(name: str, rounds: int) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            ran.append(name)
            for _ in range(rounds):
                x = x.sin()
            return x

        return run

    ways = {"slow": way("slow", 200), "quick": way("quick", 1)}
    with autotune.on(tmp_path / "lowerings.jsonl"):
        autotune.fastest("sines", ways, [X])
        ran.clear()
        with beside(threads=2, alone=torch.get_num_threads()):
            autotune.fastest("sines", ways, [X])
    assert ran == ["quick"]


def test_threads_are_told_apart() -> None:
    inside, asked = Event(), Event()
    told: list[bool] = []

    def first() -> None:
        with beside(threads=1, alone=1):
            inside.set()
            asked.wait(SECONDS)
            told.append(accompanied())

    def second() -> None:
        inside.wait(SECONDS)
        told.append(accompanied())
        asked.set()

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(first), pool.submit(second)]:
            future.result(SECONDS)
    assert told == [False, True]
    assert not accompanied()


def test_a_thread_has_its_own_intra_op_threads() -> None:
    usual = torch.get_num_threads()

    def inside() -> tuple[int, int]:
        with beside(threads=2, alone=1):
            within = torch.get_num_threads()
        return within, torch.get_num_threads()

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(inside).result(SECONDS) == (2, 1)
    assert torch.get_num_threads() == usual


def test_no_threads_are_refused() -> None:
    with pytest.raises(FusionError, match="must be positive integers, got 0 and 2"), beside(threads=0, alone=2):
        pass
