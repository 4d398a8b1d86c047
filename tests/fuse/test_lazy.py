"""A copy that is made when one of the two is written to is a copy."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from shoal.fuse.lazy import lazily_copied

LAZY: dict[str, Callable[[], Tensor]] = {
    "whole": lambda: torch.arange(12.0).reshape(3, 4),
    "some rows": lambda: torch.arange(20.0).reshape(5, 4)[1:4],
    "no axis": lambda: torch.tensor(3.0),
    "integers": lambda: torch.arange(12),
    "nothing": lambda: torch.zeros(0, 3),
}
AT_ONCE: dict[str, Callable[[], Tensor]] = {
    "turned": lambda: torch.arange(12.0).reshape(3, 4).T,
    "expanded": lambda: torch.ones(1, 3).expand(4, 3),
    "numpy's": lambda: torch.from_numpy(np.arange(12.0)),
    "shared by processes": lambda: torch.arange(12.0).share_memory_(),
}


def is_lazy(tensor: Tensor) -> bool:
    return bool(torch._C._is_cow_tensor(tensor))


@pytest.mark.parametrize("name", [*LAZY, *AT_ONCE])
def test_neither_sees_what_is_written_to_the_other(name: str) -> None:
    make = {**LAZY, **AT_ONCE}[name]
    source, expected = make(), make()
    copied = [lazily_copied(source) for _ in range(3)]
    assert [is_lazy(one) for one in copied] == [name in LAZY] * 3
    assert all(torch.equal(one, expected) for one in copied)
    copied[0].add_(1)
    copied[1].numpy()[...] = 7
    assert torch.equal(source, expected)
    assert torch.equal(copied[2], expected)
    if name != "expanded":  # of which nothing can be written to
        source.mul_(3)
    assert torch.equal(copied[2], expected)
    assert torch.equal(copied[0], expected + 1)
    assert (copied[1] == 7).all()


def test_what_only_reads_makes_no_copy() -> None:
    source = torch.randn(6, 3, 8, 8)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 2))
    copied = lazily_copied(source)
    model(copied).square().mean().backward()
    assert is_lazy(copied)


def test_a_sparse_tensor_is_copied() -> None:
    source = torch.eye(3).to_sparse()
    copied = lazily_copied(source)
    copied.mul_(2)
    assert torch.equal(source.to_dense(), torch.eye(3))
