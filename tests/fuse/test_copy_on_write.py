"""Lazy clones: a write to a tensor does not change its clone, nor the other way round."""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shoal.fuse.aliasing import lazy_clone

X, Y = torch.randn(3, 2), torch.arange(3)

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
    copied = [lazy_clone(source) for _ in range(3)]
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


def through_its_address(tensor: Tensor) -> None:
    (ctypes.c_float * 6).from_address(tensor.data_ptr())[0] = 7


def through_another_package(tensor: Tensor) -> None:
    torch.from_dlpack(torch.utils.dlpack.to_dlpack(tensor)).add_(7)  # type: ignore[no-untyped-call]


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda tensor: tensor.add_(7),
    "a view": lambda tensor: tensor[2:].zero_(),
    "data": lambda tensor: tensor.data.add_(7),
    "out": lambda tensor: torch.add(torch.ones(6), 7, out=tensor),
    "numpy": lambda tensor: np.add(tensor.numpy(), 7, out=tensor.numpy()),
    "storage": lambda tensor: tensor.untyped_storage().fill_(7),
    "address": through_its_address,
    "dlpack": through_another_package,
}


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("written", [0, 1, 2])
def test_no_way_of_writing_reaches_others(write: str, written: int) -> None:
    source = torch.arange(6.0)
    three = [source, lazy_clone(source), lazy_clone(source)]
    WRITES[write](three[written])
    assert not torch.equal(three.pop(written), torch.arange(6.0))
    assert all(torch.equal(other, torch.arange(6.0)) for other in three)


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@pytest.mark.parametrize(
    "batch",
    [[X, Y], (X, Y), {"x": X, "y": [Y]}, Pair(X, Y), [X, ["text", Y]]],
    ids=["list", "tuple", "dict", "named", "with text"],
)
def test_batches_are_nested_as_they_were(batch: Any) -> None:
    copied = lazy_clone(batch)
    assert type(copied) is type(batch)
    leaves, spec = pytree.tree_flatten(batch)
    others, same = pytree.tree_flatten(copied)
    assert spec == same
    for leaf, other in zip(leaves, others, strict=True):
        assert (leaf is not other and torch.equal(leaf, other)) if isinstance(leaf, Tensor) else leaf == other


def test_what_only_reads_makes_no_copy() -> None:
    source = torch.randn(6, 3, 8, 8)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(144, 2))
    copied = lazy_clone(source)
    model(copied).square().mean().backward()
    assert is_lazy(copied)


def test_a_sparse_tensor_is_copied() -> None:
    source = torch.eye(3).to_sparse()
    copied = lazy_clone(source)
    copied.mul_(2)
    assert torch.equal(source.to_dense(), torch.eye(3))
