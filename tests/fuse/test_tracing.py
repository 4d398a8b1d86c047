"""Functions of an array can be traced: the trace contains plain tensors, with weights and keys as inputs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from twins import build, close

from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.randomness import keep_mask, member_keys

Tensors = dict[str, Tensor]


def traced_and_eager(array: ModelArray, fn: Callable[..., Any], *batch: Tensor) -> None:
    """Compare loss, gradients, buffers of a traced run with those of an eager run, for other weights, data and keys."""

    def step(parameters: Tensors, buffers: Tensors, keys: Tensor, *batch: Tensor) -> Any:
        with (
            torch.nn.utils.stateless._reparametrize_module(array, {**parameters, **buffers}),
            array.open(keys) as model,
        ):
            losses = fn(model, *batch).whole
        grads = torch.autograd.grad(losses.sum(), list(parameters.values()))
        return losses, grads, list(buffers.values())

    def inputs() -> tuple[Tensors, Tensors]:
        parameters = {name: (tensor.detach() + 0.01).requires_grad_() for name, tensor in array.named_parameters()}
        return parameters, {name: tensor.clone() for name, tensor in array.named_buffers()}

    keys = torch.tensor(member_keys([5, 6], [3, 3]))
    graph = make_fx(step)(*inputs(), torch.tensor(member_keys(array.seeds, array.ticks)), *(x.clone() for x in batch))
    own = [x.roll(1, 0) for x in batch]
    result, expected = graph(*inputs(), keys, *own), step(*inputs(), keys, *own)
    for i, (mine, eager) in enumerate(
        zip(torch.utils._pytree.tree_leaves(result), torch.utils._pytree.tree_leaves(expected), strict=True)
    ):
        close(mine, eager, f"result {i}")


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))


def convolutions() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 2, 3, padding=1)),
        *(nn.Dropout2d(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2, 3)),
    )


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.Sequential(nn.Embedding(11, 8, padding_idx=0), layer, nn.Flatten(), nn.Linear(40, 3))


MODELS = {
    "perceptron": (perceptron, torch.randn(6, 4, dtype=torch.float64)),
    "convolutions": (convolutions, torch.randn(6, 1, 8, 8, dtype=torch.float64)),
    "transformer": (transformer, torch.randint(0, 11, (6, 5))),
}


@pytest.mark.parametrize(
    "name",
    ["convolutions", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("perceptron", "transformer"))],
)
def test_traced(name: str) -> None:
    make, x = MODELS[name]
    loss = lambda model, x, y: F.cross_entropy(model(x), y)  # noqa: E731
    traced_and_eager(fuse(build(make, 2), [1, 2]), loss, x, torch.tensor([0, 1, 2, 0, 1, 2]))


def test_rates_of_the_members_own_are_traced() -> None:
    models = [nn.Sequential(nn.Linear(4, 8), nn.Dropout(rate)).double() for rate in (0.1, 0.6)]
    loss = lambda model, x: model(x).sum()  # noqa: E731
    traced_and_eager(fuse(models, [1, 2]), loss, torch.randn(6, 4, dtype=torch.float64))


def test_tracing_leaves_nothing_behind() -> None:
    """What a trace has put in the cache of index hashes serves outside of it, and the other way round."""
    keys, device = torch.tensor(member_keys([1, 2], [0, 0])), torch.device("cpu")
    graph = make_fx(lambda keys: keep_mask(keys, (101,), (0.5,), device))(keys)
    eager = keep_mask(keys, (101,), (0.5,), device)
    assert type(eager) is Tensor
    assert torch.equal(graph(keys), eager)
    again = make_fx(lambda keys: keep_mask(keys, (101,), (0.5,), device))(keys)
    assert torch.equal(again(keys), eager)
