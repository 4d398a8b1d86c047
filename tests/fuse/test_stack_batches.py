"""`stack`: batches of which each member has its own."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from twins import build, close, compare

import shoal
from shoal.core.errors import FusionError
from shoal.fuse.api import fuse

generator = torch.Generator().manual_seed(0)
OWN = [torch.randn(6, 4, generator=generator, dtype=torch.float64) for _ in range(10)]
LABELS = [torch.randint(0, 3, (6,), generator=generator) for _ in range(10)]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3))


@pytest.mark.parametrize("members", [1, 3])
def test_each_member_sees_its_own_batch(members: int) -> None:
    models, twins = build(net, members), build(net, members)
    array = fuse(models)
    loss = lambda model, batch: F.cross_entropy(model(batch["x"]), batch["y"])  # noqa: E731
    batches = [{"x": x, "y": y} for x, y in zip(OWN, LABELS, strict=True)][:members]
    losses = array.map(loss, shoal.stack(batches))
    losses.sum().backward()
    for b, twin in enumerate(twins):
        own = loss(twin, batches[b])
        own.backward()
        close(losses[b], own, f"loss of {b}")
        for path, data, _ in array.stacked_tensors():
            if isinstance(data, nn.Parameter):
                close(data.grad[b], twin.get_parameter(path).grad, f"gradient of {path} of {b}")


@pytest.mark.parametrize("members", [1, 3])
def test_a_whole_tensor_is_not_copied(members: int) -> None:
    models = build(net, members)
    array = fuse([model.eval() for model in models])
    whole = torch.stack(OWN[:members]).requires_grad_()
    stacked = shoal.stack(whole)
    assert stacked.whole is whole
    out = array(stacked)
    compare(out, [model(x) for model, x in zip(models, OWN, strict=False)])
    out.sum().backward()
    assert whole.grad is not None


def test_one_array_feeds_another() -> None:
    makers = [lambda: nn.Linear(4, 6), lambda: nn.Linear(6, 2)]
    first, second = (fuse(build(make, 3)) for make in makers)
    out = second(shoal.stack(first(OWN[0])))
    compare(out, [b(a(OWN[0])) for a, b in zip(first.unfuse(), second.unfuse(), strict=True)])


REFUSED: dict[str, tuple[Any, str]] = {
    "shapes": ([OWN[0], OWN[1][:3]], r"different shapes: \(6, 4\), \(3, 4\)"),
    "structure": ([{"x": OWN[0]}, {"y": OWN[0]}], "differ in structure"),
    "values": ([(OWN[0], 1), (OWN[0], 2)], "hold 1 and others"),
    "none": ([], "one batch for each member"),
    "no axis": (torch.tensor(1.0), r"got shape \(\)"),
    "stacked": (shoal.stack(OWN[:2]), "stacked already"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    batches, message = REFUSED[name]
    with pytest.raises(FusionError, match=message):
        shoal.stack(batches)


def test_a_stack_of_another_number_of_members_is_refused() -> None:
    array = fuse(build(net, 3))
    with pytest.raises(FusionError, match="2 batches are stacked for an array of 3 members"):
        array(shoal.stack(OWN[:2]))


def test_a_shared_tensor_stays_shared() -> None:
    def seen(model: nn.Module, own: Tensor, shared: Tensor) -> Tensor:
        return own @ shared

    array = fuse(build(net, 2))
    out = array.map(seen, shoal.stack(OWN[:2]), OWN[2].T)
    compare(out, [x @ OWN[2].T for x in OWN[:2]])
