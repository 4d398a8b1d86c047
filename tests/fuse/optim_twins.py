"""An array with its members' optimizers, and equal models with their own optimizers, for comparison."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shoal.fuse.api import fuse
from shoal.fuse.array import ModelArray
from shoal.fuse.optim.fused import FusedOptimizer, fuse_optimizers
from shoal.fuse.optim.param_group_batch import Lowering

Make = Callable[[nn.Module, int], Optimizer]


class Net(nn.Module):
    """Parameters of several ranks; the last never has a gradient."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 4, dtype=dtype))
        self.bias = nn.Parameter(torch.randn(3, dtype=dtype))
        self.scale = nn.Parameter(torch.randn((), dtype=dtype))
        self.unused = nn.Parameter(torch.randn(2, dtype=dtype))


class Twins:
    """`array` and `fused` on one side, `alone` and `optimizers` on the other."""

    array: ModelArray
    fused: FusedOptimizer

    def __init__(
        self,
        make: Make,
        members: int,
        *,
        lowering: Lowering | None = None,
        dtype: torch.dtype = torch.float64,
        seed: int = 0,
        device: str = "cpu",
    ) -> None:
        torch.default_generator.manual_seed(seed)  # that of torch also notes a stack for each kind of GPU
        self.lowering = lowering
        self.alone = [Net(dtype).to(device) for _ in range(members)]
        self.optimizers = [make(model, b) for b, model in enumerate(self.alone)]
        models = copy.deepcopy(self.alone)
        self.own = [make(model, b) for b, model in enumerate(models)]
        self.generator = torch.Generator().manual_seed(seed + 1)
        self.fuse(models)

    def fuse(self, models: Sequence[nn.Module]) -> None:
        self.array = fuse(models)
        self.fused = fuse_optimizers(self.own, self.array, lowering=self.lowering)

    def give_grads(self, skip: Sequence[str] = ("unused",)) -> None:
        """Random gradients, the same on both sides."""
        for path, stacked, own in self.array.stacked_tensors():
            grad = None
            if path not in skip:
                grad = torch.randn(stacked.shape, generator=self.generator, dtype=torch.float64).to(stacked)
            stacked.grad = grad
            for b, model in enumerate(self.alone):
                model.get_parameter(path).grad = None if grad is None else grad[b].clone()
            assert all(p.grad is None for p in own)

    def step(self, times: int = 1, skip: Sequence[str] = ("unused",)) -> None:
        for _ in range(times):
            self.give_grads(skip)
            self.fused.step()
            for optimizer in self.optimizers:
                optimizer.step()

    def check(self, rtol: float = 1e-9) -> None:
        """Weights and state dictionaries agree."""
        members = self.array.unfuse()
        for b, (mine, other) in enumerate(zip(members, self.alone, strict=True)):
            same(mine.state_dict(), other.state_dict(), rtol, f"weights of {b}")
        for b, (own, other) in enumerate(zip(self.fused.unfuse(), self.optimizers, strict=True)):
            same(own.state_dict(), other.state_dict(), rtol, f"state of {b}")


def same(a: object, b: object, rtol: float, where: str) -> None:
    """Nested values agree, tensors in shape, dtype and (nearly) value."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        tolerance: dict[str, Any] = {"rtol": rtol, "atol": rtol, "check_device": False}  # as of counts of steps
        torch.testing.assert_close(a, b, **tolerance, equal_nan=True, msg=lambda m: f"{where}: {m}")
    elif isinstance(a, dict) and isinstance(b, dict):
        assert list(a) == list(b), where
        for key in a:
            same(a[key], b[key], rtol, f"{where}.{key}")
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            same(x, y, rtol, f"{where}.{i}")
    else:
        assert a == b, where
