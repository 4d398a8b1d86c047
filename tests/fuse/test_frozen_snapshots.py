"""Large frozen parameters of all members are not copied by snapshots: neither in first steps nor in capture."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shoal.fuse.transaction as transaction_module
from shoal.core.errors import FusionError
from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.capture import CapturedStep
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers
from shoal.fuse.transaction import Transaction
from shoal.fuse.watched_step import WatchedStep

X = torch.randn(6, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
BASE_BYTES = 32 * 32 * 8


class Averaging(nn.Module):
    """A frozen layer, each member's own, that may follow a trained one."""

    def __init__(self, member: int) -> None:
        super().__init__()
        torch.manual_seed(member)
        self.own = nn.Linear(32, 4, dtype=torch.float64)
        self.frozen = nn.Linear(32, 4, dtype=torch.float64).requires_grad_(False)


class Adapted(nn.Module):
    """A frozen layer that is equal in all members, and a small one of each member's own beside it."""

    def __init__(self, member: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.base = nn.Linear(32, 32, bias=False, dtype=torch.float64).requires_grad_(False)
        torch.manual_seed(1 + member)
        self.own = nn.Linear(32, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.own(x)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that each snapshot has copied; frozen parameters are large from half of the base's size."""
    found: list[int] = []
    begin = Transaction.__init__

    def counted(self: Transaction, *args: Any, **options: Any) -> None:
        begin(self, *args, **options)
        kept = [saved for _, _, saved in (*self._values, *self._tensors)]
        found.append(sum(saved.nbytes for saved in (*kept, *(own[-1] for own in self._outside)) if saved is not None))

    monkeypatch.setattr(transaction_module, "_MOST_BYTES", BASE_BYTES // 2)
    monkeypatch.setattr(Transaction, "__init__", counted)
    return found


def adapted() -> tuple[ModelArray, FusedOptimizer]:
    models = [Adapted(b) for b in range(3)]
    array = fuse(models)
    return array, fuse_optimizers([torch.optim.SGD(model.own.parameters(), lr=0.1) for model in models], array)


def step(array: ModelArray, optimizer: FusedOptimizer, fn: Callable[..., Tensor]) -> None:
    optimizer.zero_grad()
    array.map(fn, X).sum().backward()
    optimizer.step()


def square(model: Any, x: Tensor) -> Tensor:
    return model(x).square().mean()


def writing(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        model.base.weight.mul_(2)
    return square(model, x)


def test_no_snapshot_copies_the_base(copied: list[int]) -> None:
    array, optimizer = adapted()
    step(array, optimizer, square)
    CapturedStep(array, optimizer, square, X, compiling=False)
    assert len(copied) == 7, "one of the first step, and two in each of three runs"
    assert max(copied) == 3 * (32 + 1) * 8, "the members' own layers"


def test_a_small_one_is_restored_after_a_failure() -> None:
    array, _ = adapted()
    before = array.members[0].base.weight.clone()  # type: ignore[union-attr,operator]
    with pytest.raises(FusionError, match="compute with tensors"):
        array.map(lambda model, x: float(writing(model, x)), X)
    torch.testing.assert_close(array.members[0].base.weight, before, rtol=0, atol=0)


def test_a_failure_after_a_write_to_a_large_one_is_told(copied: list[int]) -> None:
    array, _ = adapted()
    with pytest.raises(FusionError, match=r"has written to a frozen parameter .* too large to be restored"):
        array.map(lambda model, x: float(writing(model, x)), X)
    assert copied


def test_a_captured_step_does_not_write_to_one(copied: list[int]) -> None:
    """An eager one may: it is a step of the user's."""
    array, optimizer = adapted()
    base = array.members[0].base.weight
    before = base.clone()  # type: ignore[union-attr,operator]
    step(array, optimizer, writing)
    torch.testing.assert_close(base, 2 * before, rtol=0, atol=0)
    with pytest.raises(FusionError, match=r"`aten.mul_.Tensor` writes to a frozen parameter"):
        CapturedStep(array, optimizer, writing, X, compiling=False)
    torch.testing.assert_close(base, 2 * before, rtol=0, atol=0)
    assert copied


def compared(model: Any, x: Tensor) -> Tensor:
    return (model.own(x) - model.frozen(x)).square().mean()


def averaged(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        for kept, own in zip(model.frozen.parameters(), model.own.parameters(), strict=True):
            kept.lerp_(own, 0.1)
    return compared(model, x)


@pytest.mark.parametrize(("fn", "lent"), [(compared, {True}), (averaged, {False})])
def test_each_members_own_is_copied_only_where_a_step_writes_to_it(
    fn: Callable[..., Tensor], lent: set[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    arrays = []
    for _ in range(2):
        models = [Averaging(b) for b in range(2)]
        array = fuse(models)
        optimizer = fuse_optimizers([torch.optim.SGD(model.own.parameters(), lr=0.1) for model in models], array)
        step(array, optimizer, fn)
        arrays.append((array, optimizer))
    (array, optimizer), (twin, twins_optimizer) = arrays
    frozen = [tensor.data_ptr() for path, tensor, _ in array.stacked_tensors() if path.startswith("frozen")]
    ran: list[set[bool]] = []

    def watch(step: WatchedStep, tensors: Sequence[Tensor]) -> list[Any]:
        functions = run(step, tensors)
        ran.append({any(tensor.data_ptr() == place for tensor in tensors) for place in frozen})
        return functions

    run = WatchedStep.watch
    monkeypatch.setattr(WatchedStep, "watch", watch)
    captured = CapturedStep(array, optimizer, fn, X, compiling=False)
    assert ran == [lent] * 2
    for _ in range(3):
        assert captured.fits(X)
        captured(X)
        step(twin, twins_optimizer, fn)
    for own, other in zip(array.members, twin.members, strict=True):
        torch.testing.assert_close(own.state_dict(), other.state_dict(), rtol=1e-9, atol=1e-12)
