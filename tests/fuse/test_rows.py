"""Memory of the rows of members that have left an array."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from shoal.fuse.api import fuse
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.rows import stack_rows

WIDTH = 256


@pytest.mark.parametrize(
    ("members", "width", "left", "copied"),
    [
        pytest.param(16, WIDTH, 8, False, id="half of a large tensor"),
        pytest.param(16, WIDTH, 7, True, id="less than half of a large tensor"),
        pytest.param(16, WIDTH, 1, True, id="a single row"),
        pytest.param(16, 8, 1, False, id="of a small tensor"),
    ],
)
def test_rows_are_copied_where_most_of_their_memory_is_not_used(
    members: int, width: int, left: int, copied: bool
) -> None:
    whole = torch.randn(members, width, width)
    rows = [nn.Parameter(row) for row in whole.unbind()]
    stacked = stack_rows(rows[2 : 2 + left] if left < 8 else rows[:left], move=True)
    first = 2 if left < 8 else 0
    assert torch.equal(stacked, whole[first : first + left])
    assert (stacked.untyped_storage().data_ptr() != whole.untyped_storage().data_ptr()) is copied
    assert all(row.data_ptr() == mine.data_ptr() for row, mine in zip(rows[first:], stacked, strict=False))


def test_an_array_of_survivors_frees_the_memory_of_the_others() -> None:
    models = [nn.Linear(WIDTH, WIDTH) for _ in range(16)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model in models]

    def step(array: Any, optimizer: Any) -> None:
        array(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()

    array = fuse(models)
    step(array, fuse_optimizers(optimizers, array))
    states = [
        optimizer.state[model.weight]["momentum_buffer"] for optimizer, model in zip(optimizers, models, strict=True)
    ]
    held = [weakref.ref(tensor.untyped_storage()) for tensor in (models[0].weight, states[0])]
    before = [model.weight.detach().clone() for model in models[:4]]
    survivors = array.select([0, 1, 2, 3])
    for model, weight in zip(models[:4], before, strict=True):
        assert torch.equal(model.weight, weight)
    optimizer = fuse_optimizers(optimizers[:4], survivors)
    step(survivors, optimizer)
    del array, models[4:], optimizers[4:], states
    gc.collect()
    assert [storage() for storage in held] == [None, None]
    kept = [model.weight for model in models]
    kept += [one.state[weight]["momentum_buffer"] for one, weight in zip(optimizers, kept, strict=True)]
    assert {tensor.untyped_storage().nbytes() for tensor in kept} == {4 * 4 * WIDTH * WIDTH}
