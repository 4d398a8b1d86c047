"""Arrays that run in several threads at once compute what each array computes on its own."""

import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, Event
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import _pop_mode, _push_mode, handle_torch_function, has_torch_function_unary
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from shoal.core.errors import FusionError
from shoal.fuse import autotune
from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.capture import CapturedStep
from shoal.fuse.intercept import member_run
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.patches import HiddenWarning
from shoal.fuse.randomness import RandomSource

X = torch.randn(3, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
SECONDS = 20.0
"""After so long a thread that waits for another has hung."""


pytestmark = pytest.mark.usefixtures("often")


class Mixed(nn.Module):
    """Masks of dropout, numbers that are drawn member by member, a recurrent layer, and a part that runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.4)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.out = nn.Sequential(nn.Linear(4, 4), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        x = self.lstm(self.drop(x))[0]
        x = x + torch.randn(4) + torch.rand_like(x)
        # Else torch sets the generator that all threads share as it runs the part again.
        return self.drop(checkpoint(self.out, x, use_reentrant=False, preserve_rng_state=False))


def array_of(seed: int, members: int = 2, make: Callable[[], nn.Module] = Mixed) -> ModelArray:
    models = []
    for b in range(members):
        torch.manual_seed(seed + b)
        models.append(make().double())
    return fuse(models, range(seed, seed + members))


def gradients(array: ModelArray) -> list[Tensor]:
    """The loss and the gradients of one step."""
    array.zero_grad()
    losses = array.map(lambda model, x: model(x).square().mean(), X)
    losses.sum().backward()
    return [losses.detach(), *(parameter.grad.clone() for parameter in array.parameters())]


def at_once(*runs: Callable[[], Any]) -> list[Any]:
    """What each returns, all having begun together."""
    barrier = Barrier(len(runs), timeout=SECONDS)

    def begin(run: Callable[[], Any]) -> Any:
        torch.set_num_threads(1)
        barrier.wait()
        return run()

    with ThreadPoolExecutor(len(runs)) as pool:
        return [future.result(SECONDS) for future in [pool.submit(begin, run) for run in runs]]


@pytest.mark.parametrize("members", [(2, 2), (1, 3)], ids=str)
def test_arrays_at_once_equal_arrays_alone(members: tuple[int, int]) -> None:
    steps = range(6)
    expected = [[gradients(array) for _ in steps] for array in map(array_of, (5, 70), members)]
    arrays = list(map(array_of, (5, 70), members))
    results = at_once(*(lambda array=array: [gradients(array) for _ in steps] for array in arrays))
    torch.testing.assert_close(results, expected, rtol=1e-9, atol=1e-12)


def again_behind_its_back(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=True).sum()


def linear() -> nn.Module:
    return nn.Linear(4, 4)


def test_a_run_that_ends_leaves_another_its_guards() -> None:
    first_runs, second_runs, first_is_over = Event(), Event(), Event()

    def first() -> None:
        with array_of(0, make=linear).open():
            first_runs.set()
            second_runs.wait(SECONDS)
        first_is_over.set()

    def second() -> None:
        first_runs.wait(SECONDS)
        with array_of(9, make=linear).open() as model:
            second_runs.set()
            first_is_over.wait(SECONDS)
            with pytest.raises(FusionError, match="use_reentrant=False"):
                again_behind_its_back(model, X)

    flatten = nn.RNNBase.flatten_parameters
    at_once(first, second)
    assert "apply" not in vars(CheckpointFunction)
    assert nn.RNNBase.flatten_parameters is flatten


def test_a_model_of_another_thread_is_left_alone() -> None:
    def alone() -> Tensor:
        model = linear().double()
        again_behind_its_back(model, X.clone().requires_grad_()).backward()
        return model.weight.grad

    with array_of(0, make=linear).open():
        assert at_once(alone)[0] is not None


def test_a_thread_that_a_mode_is_handed_to_draws_from_its_source() -> None:
    """As in the backward pass on a GPU, which runs in a thread of autograd's with the modes of the one that called."""

    def drawn(mode: Any) -> Tensor:
        _push_mode(mode)
        try:
            return torch.rand(3)
        finally:
            _pop_mode()

    def mode_of_run() -> Any:
        mode = _pop_mode()
        _push_mode(mode)
        return mode

    results = []
    for elsewhere in (False, True):
        with member_run(RandomSource(torch.tensor([7]), single_member=True)):
            mode = mode_of_run()
            results.append(at_once(lambda mode=mode: drawn(mode))[0] if elsewhere else torch.rand(3))
    assert torch.equal(*results)


def test_tuners_are_left_in_any_order() -> None:
    outer, inner = autotune.forced_lowerings({"double": "b"}), autotune.forced_lowerings({"double": "c"})
    lowerings = {name: lambda x, name=name: (ran.append(name), x)[1] for name in "abc"}
    ran: list[str] = []
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    autotune.fastest("double", lowerings, [X])
    inner.__exit__(None, None, None)
    autotune.fastest("double", lowerings, [X])
    assert ran == ["c", "a"]


def test_one_thread_measures_at_a_time(tmp_path: Any) -> None:
    measuring, asked = Event(), Event()
    ran: list[str] = []

    def slow(x: Tensor) -> Tensor:
        measuring.set()
        asked.wait(SECONDS)
        return x * 2

    def first() -> None:
        autotune.fastest("slow", {"slow": slow, "other": lambda x: x * 2}, [X])

    def second() -> None:
        measuring.wait(SECONDS)
        autotune.fastest("double", {name: lambda x, name=name: (ran.append(name), x)[1] for name in "ab"}, [X])
        asked.set()

    with autotune.autotuning(tmp_path / "lowerings.jsonl"):
        at_once(first, second)
    assert ran == ["a"]


def test_steps_are_captured_one_at_a_time() -> None:
    def capture(array: ModelArray) -> None:
        optimizer = fuse_optimizers([torch.optim.SGD(m.parameters(), lr=0.1) for m in array.members], array)
        loss = lambda model, x: model(x).square().mean()  # noqa: E731
        array.map(loss, X).sum().backward()
        for _ in range(3):
            CapturedStep(array, optimizer, loss, X, compiling=False)

    arrays = [array_of(seed, make=linear) for seed in (0, 9)]
    at_once(*(lambda array=array: capture(array) for array in arrays))
    assert not torch.compiler.is_compiling()


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
    array = fuse([Mixed().double() for _ in range(2)], [1, 2])
    losses = array.map(lambda model, x: checkpoint(model.out, x, use_reentrant=False).sum(), torch.ones(3, 4).double())
    losses.sum().backward()
    assert array.members[0].out[0].weight.grad is None
    assert all(parameter.grad is not None for name, parameter in array.named_parameters() if ".out." in name)


def test_a_warning_is_hidden_until_the_last_thread_leaves() -> None:
    hidden = HiddenWarning("of no interest")
    outer, inner = hidden(), hidden()
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    warnings.warn("of no interest to anyone", UserWarning, stacklevel=1)
    inner.__exit__(None, None, None)
    with pytest.raises(UserWarning, match="of no interest"):
        warnings.warn("of no interest to anyone", UserWarning, stacklevel=1)
