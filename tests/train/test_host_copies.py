"""Tensors of a GPU share buckets for few copies to host memory, none of which is waited for; a stand-in counts them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.train import host_copies as module
from shoal.train.checkpoint import Checkpoint, snapshot
from shoal.train.host_copies import host_copies


class OnGpu(Tensor):
    """A tensor of the CPU that says that it is on a GPU, and counts the functions that are called on it."""

    called: list[str] = []  # noqa: RUF012  (of all)
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnGpu":
        made = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device="cuda:0"
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.called.append(function.overloadpacket.__name__)
        inner = pytree.tree_map_only(OnGpu, lambda each: each.inner, (args, kwargs or {}))
        found = function(*inner[0], **inner[1])
        if function is torch.ops.aten.copy_.default:
            return args[0]
        return found if (kwargs or {}).get("device") else pytree.tree_map_only(Tensor, OnGpu, found)


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Take stand-ins for tensors of a GPU; the waits for events are noted here, with the device that is current."""
    found: list[str] = []
    current: list[str] = []

    class Event:
        def synchronize(self) -> None:
            found.append(f"event on {current[-1] if current else 'the first device'}")

    @contextmanager
    def device(name: torch.device) -> Iterator[None]:
        current.append(str(name))
        yield
        current.pop()

    monkeypatch.setattr(module, "is_plain", lambda tensor: tensor.layout is torch.strided)
    monkeypatch.setattr(
        module, "memory_key", lambda tensor: tensor.inner.data_ptr() if type(tensor) is OnGpu else tensor
    )
    monkeypatch.setattr(module, "_pinned_like", lambda flat: torch.empty(flat.shape, dtype=flat.dtype))
    monkeypatch.setattr(module, "_recorded_event", lambda device: Event())
    monkeypatch.setattr(torch.cuda, "device", device)
    OnGpu.called.clear()
    return found


MOVES = {"cat", "copy_", "_to_copy", "clone", "_local_scalar_dense", "nonzero", "item"}


def moves() -> list[str]:
    return [name for name in OnGpu.called if name in MOVES]


def samples() -> list[Tensor]:
    return [
        torch.randn(5, 3),
        torch.randn(3, 5).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(4, 5, 6).permute(1, 2, 0),
        torch.randn(6, 4)[:, 1:3],
        torch.tensor(2.5),
        torch.arange(4),
        torch.tensor(3),
        torch.randn(7).double(),
    ]


def test_one_copy_for_each_dtype_has_the_values_and_strides(waited: list[str]) -> None:
    tensors = samples()
    copies, wait = host_copies([OnGpu(each) for each in tensors])
    assert moves() == ["clone", "cat", "copy_", "cat", "copy_", "copy_"], "a view with gaps is closed up on the device"
    assert waited == []
    wait()
    assert waited == ["event on cuda:0"]
    for tensor, copy in zip(tensors, copies, strict=True):
        assert type(copy) is Tensor
        assert torch.equal(tensor, copy)
        assert copy.untyped_storage().nbytes() == tensor.nbytes
        assert tensor.stride() == copy.stride() or not tensor.is_contiguous()


def test_a_bucket_takes_little_memory_of_the_device(waited: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKET_BYTES", 100)
    tensors = [torch.randn(size) for size in (10, 10, 10, 400, 3, 25)]
    copies, _ = host_copies([OnGpu(each) for each in tensors])
    assert moves() == ["cat", *["copy_"] * 5], "one bucket of two tensors, and four of one"
    assert all(map(torch.equal, tensors, copies))


def test_pinned_memory_is_limited(waited: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "BUCKET_BYTES", 100)
    monkeypatch.setattr(module, "PINNED_BYTES", 120)
    tensors = [torch.randn(size) for size in (10, 10, 5, 400, 3, 25)]
    copies, wait = host_copies([OnGpu(each) for each in tensors])
    assert moves() == ["cat", "copy_", *["_to_copy"] * 3], "100 bytes are pinned, the rest is not"
    wait()
    assert waited == ["event on cuda:0"]
    assert all(map(torch.equal, tensors, copies))


@pytest.mark.parametrize("pinned", [True, False])
def test_tensors_that_the_device_has_no_memory_to_join_are_copied_one_by_one(
    pinned: bool, waited: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(rows: list[Tensor]) -> Tensor:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch, "cat", full)
    tensors = samples()
    copies, _ = host_copies([OnGpu(each) for each in tensors], pinned)
    assert all(map(torch.equal, tensors, copies))
    assert all(copy.untyped_storage().nbytes() == tensor.nbytes for tensor, copy in zip(tensors, copies, strict=True))


def test_a_checkpoint_of_a_gpu_takes_one_copy_for_each_dtype_and_no_wait(waited: list[str]) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)) for _ in range(20)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    states: Any = model.state_dict(), optimizer.state_dict()
    states = pytree.tree_map_only(Tensor, lambda each: OnGpu(each.detach()), states)
    OnGpu.called.clear()
    taken = snapshot(Checkpoint(0, 1, 0, *states, None, ()))
    assert len(pytree.tree_leaves(taken.weights[taken.stem]["model"])) == 140
    assert moves() == ["cat", "copy_", "cat", "copy_"]
    assert waited == []


def test_without_pinned_memory_the_copies_are_complete(waited: list[str]) -> None:
    tensors = samples()
    copies, wait = host_copies([OnGpu(each) for each in tensors], pinned=False)
    wait()
    assert moves() == ["clone", "cat", "_to_copy", "cat", "_to_copy", "_to_copy"]
    assert waited == []
    assert all(map(torch.equal, tensors, copies))


def test_tensors_of_the_host_are_copied_and_tied_ones_once() -> None:
    whole = torch.randn(4, 3)
    empty = torch.empty(0, 2)
    copies, _ = host_copies([whole, whole[1], nn.Parameter(whole), empty, torch.empty(0, 2), whole.to_sparse()])
    assert copies[0].data_ptr() == copies[2].data_ptr() != whole.data_ptr()
    assert torch.equal(copies[1], whole[1])
    assert copies[1].untyped_storage().nbytes() == 12
    assert not any(copy.requires_grad for copy in copies)
    assert copies[3].shape == empty.shape
    assert torch.equal(copies[5].to_dense(), whole)


def test_views_that_differ_only_in_their_sign_or_phase_are_not_taken_for_one_memory() -> None:
    value = torch.randn(3, dtype=torch.complex64)
    copies, _ = host_copies([value, value.conj(), value.imag, value.conj().imag])
    assert torch.equal(copies[1], value.conj())
    assert torch.equal(copies[3], -value.imag)
