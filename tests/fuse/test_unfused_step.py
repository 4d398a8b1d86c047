"""`UnfusedStep` does what `step` and `zero_grad` of the optimizer do, also with hooks and a profiler."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

from shoal.fuse.optim.unfused_step import UnfusedStep
from shoal.fuse.per_member import member_batch

X = torch.randn(12, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X.sum(1, keepdim=True)


def stepped(change: Callable[[Optimizer], object], by_update: bool) -> tuple[list[Tensor], list[str]]:
    """Parameters after three steps of an optimizer that was changed, and what was called."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
    optimizer = Adam(model.parameters(), 0.1)
    called: list[str] = []
    vars(optimizer)["called"] = called
    change(optimizer)
    update = UnfusedStep(optimizer)
    for _ in range(3):
        update.zero_grad() if by_update else optimizer.zero_grad()
        F.mse_loss(model(X), Y).backward()
        update() if by_update else optimizer.step()
    return [each.detach() for each in model.parameters()], called


def pre_hook(optimizer: Any) -> None:
    optimizer.register_step_pre_hook(lambda *_: optimizer.called.append("before"))


def post_hook(optimizer: Any) -> None:
    optimizer.register_step_post_hook(lambda *_: optimizer.called.append("after"))


def own_zero_grad(optimizer: Any) -> None:
    own = optimizer.zero_grad

    def zero_grad(set_to_none: bool = True) -> None:
        optimizer.called.append("zero_grad")
        own(set_to_none)

    optimizer.zero_grad = zero_grad


def own_step(optimizer: Any) -> None:
    own = optimizer.step

    def step(closure: Any = None) -> None:
        optimizer.called.append("step")
        own(closure)

    optimizer.step = step


@pytest.mark.parametrize("change", [lambda optimizer: None, pre_hook, post_hook, own_zero_grad, own_step])
def test_an_update_is_what_the_optimizer_does(change: Callable[[Any], None]) -> None:
    ours, said = stepped(change, by_update=True)
    own, expected = stepped(change, by_update=False)
    torch.testing.assert_close(ours, own, rtol=1e-12, atol=0)
    assert said == expected


def test_what_is_put_around_the_step_of_a_class_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    stepped(lambda optimizer: None, by_update=True)
    calls = []
    own = Adam.step

    @functools.wraps(own)
    def step(self: Adam, closure: Any = None) -> Any:
        calls.append(self)
        return own(self, closure)

    monkeypatch.setattr(Adam, "step", step)
    stepped(lambda optimizer: None, by_update=True)
    assert len(calls) == 3


def test_a_profiler_sees_steps_under_torchs_names() -> None:
    with torch.profiler.profile() as profiler:
        stepped(lambda optimizer: None, by_update=True)
    names = {event.key: event.count for event in profiler.key_averages()}
    assert names["Optimizer.step#Adam.step"] == names["Optimizer.zero_grad#Adam.zero_grad"] == 3


def test_a_step_leaves_no_graph_and_gradients_enabled() -> None:
    parameters, _ = stepped(lambda optimizer: None, by_update=True)
    assert torch.is_grad_enabled()
    assert not any(each.requires_grad for each in parameters)


def test_a_lone_members_batch_is_a_list_of_its_own() -> None:
    batch = [X, Y]
    mine = member_batch(batch, 0, 1)
    assert mine is not batch
    assert all(a is b for a, b in zip(mine, batch, strict=True))
