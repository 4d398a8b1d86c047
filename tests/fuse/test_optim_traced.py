"""A step traced by `make_fx` computes what the step itself computes."""

from typing import Any

import pytest
import torch
from optim_twins import Make, Twins
from optimizer_factories import RULES
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim import SGD, Adam, AdamW

from shoal.fuse.capture import _one_fake_mode

MAKES: dict[str, Make] = {
    "sgd": lambda model, b: SGD(model.parameters(), lr=0.1 + b),
    "dampening": lambda model, b: SGD(model.parameters(), lr=0.1 + b, momentum=0.9, dampening=0.1 * b),
    "adam": lambda model, b: Adam(model.parameters(), lr=0.1 + b, amsgrad=True, weight_decay=0.1 * b),
    "cohorts": lambda model, b: AdamW(model.parameters(), lr=0.1, amsgrad=b == 1),
    "groups": lambda model, b: Adam([{"params": [model.bias], "lr": 0.1 * (b + 1)}, {"params": [model.weight]}]),
    **{name: RULES[name] for name in ("sgd-nesterov", "adamax", "nadam-decoupled", "radam", "adagrad", "adadelta")},
    **{name: RULES[name] for name in ("rmsprop-momentum", "rmsprop-centered")},
}


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128], ids=["real", "complex"])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_traced_step(make: Make, dtype: torch.dtype) -> None:
    twins = Twins(make, 3, dtype=dtype)
    live = [p for path, p, _ in twins.array.stacked_tensors() if path != "unused"]
    traced = twins.fused.traced(live)
    assert traced is not None

    def step(params: list[Tensor], grads: list[Tensor], state: list[Tensor], numbers: list[Tensor]) -> list[Tensor]:
        traced.apply(params, grads, state, numbers)
        return [*params, *state]

    def arguments() -> list[Any]:
        params = [p.detach() for p in traced.params]
        return [params, [p.grad for p in traced.params], traced.state, traced.coefficients]

    twins.give_grads()
    with _one_fake_mode():  # as captured steps are traced
        graph = make_fx(lambda *args: step(*[[t.clone() for t in some] for some in args]))(*arguments())
    version = twins.fused.version
    for n in range(4):
        for side in (twins.own, twins.optimizers):
            for b, optimizer in enumerate(side):
                optimizer.param_groups[0]["lr"] = 0.1 * (n + 1) + b
        twins.give_grads()
        twins.fused.refresh()
        traced.advance(traced.counters, traced.coefficients)
        new = graph(*arguments())
        with torch.no_grad():
            for old, value in zip([*traced.params, *traced.state], new, strict=True):
                old.copy_(value)
        twins.fused.mark_stepped()
        for optimizer in twins.optimizers:
            optimizer.step()
    twins.check()
    assert twins.fused.version == version
    twins.step(2)
    twins.check()


def test_what_steps_by_itself_is_not_traced() -> None:
    assert Twins(lambda model, b: torch.optim.Rprop(model.parameters()), 2).fused.traced() is None


def test_a_first_trace_after_eager_steps() -> None:
    twins = Twins(MAKES["dampening"], 2)
    twins.step(2)
    traced = twins.fused.traced()
    assert traced is not None
    assert len(traced.params) == 4
    steps = {part.stacked_param.path: part.steps.tolist() for batch in traced.batches for part, _ in batch.parts}
    assert steps == {"weight": [2, 2], "bias": [2, 2], "scale": [2, 2], "unused": [0, 0]}
