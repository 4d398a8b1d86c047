"""On a GPU, a settled step makes the host wait nowhere; counted on a GPU that is not there."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from support.pretended_gpu import Counts, PretendedGpu
from torch import Tensor, nn

from shoal.fuse.api import fuse
from shoal.fuse.optim.fused import fuse_optimizers
from shoal.fuse.scaler import GradScaler
from shoal.fuse.step import StepMode, TrainingStep

MEMBERS = 3
Maker = Callable[[int], nn.Module]


class Net(nn.Module):
    """A model with the numbers and the layers of a member."""

    def __init__(self, *between: nn.Module, factor: float = 1.0, smoothing: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 8), *between, nn.Linear(8, 4))
        self.factor = factor
        self.smoothing = smoothing

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) * self.factor


def loss(net: Any, batch: Any) -> Tensor:
    x, y = batch
    return F.cross_entropy(net(x), y, label_smoothing=net.smoothing)


def sgd(params: Any, b: int) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.01 * (1 + b), momentum=0.9)


def settled(mode: StepMode, make: Maker, optimizer: Any = sgd, scaled: bool = False, **options: Any) -> Counts:
    """The counts of a settled step, whose learning rates are others than those of the step before."""
    torch.manual_seed(0)
    models = [make(b).train() for b in range(MEMBERS)]
    batch = (torch.randn(5, 6), torch.arange(5) % 4)
    with PretendedGpu() as gpu:
        gpu.claim(models, batch)
        array = fuse(models, seeds=range(MEMBERS), strict=False)
        fused = fuse_optimizers([optimizer(model.parameters(), b) for b, model in enumerate(models)], array)
        scaler = GradScaler(array) if scaled else None
        step = TrainingStep(array, fused, loss, (mode,), scaler=scaler, **options)
        while step.mode is None:
            step(batch)
        step(batch)
        for member in fused.members:
            member.param_groups[0]["lr"] *= 0.5
        with gpu.counting() as counts:
            step(batch)
    return counts


MODELS: dict[str, Maker] = {
    "dropout": lambda b: Net(nn.Dropout(0.3)),
    "own dropout rates": lambda b: Net(nn.Dropout(0.1 + 0.2 * b)),
    "own dropout rates, one zero": lambda b: Net(nn.Dropout(0.2 * b)),
    "alpha dropout of own rates": lambda b: Net(nn.AlphaDropout(0.1 + 0.2 * b)),
    "own factors": lambda b: Net(factor=1.0 + b),
    "own label smoothing": lambda b: Net(smoothing=0.1 * b),
    "own momentum of batch norms": lambda b: Net(nn.BatchNorm1d(8, momentum=0.1 * (1 + b))),
    "an activation of one member's own": lambda b: Net(nn.PReLU() if b else nn.Tanh()),
    "a transformer's layer": lambda b: Net(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1 + 0.1 * b)),
    "a layer of one member's own": lambda b: Net(nn.Linear(8, 8) if b else nn.Tanh()),
}


@pytest.mark.parametrize("mode", ["eager", "plain"])
@pytest.mark.parametrize("name", MODELS)
def test_no_step_waits(name: str, mode: StepMode) -> None:
    assert settled(mode, MODELS[name], max_norm=1.0).waits == {}


@pytest.mark.parametrize("optimizer", ["NAdam", "RAdam", "Adamax", "Adagrad", "Adam", "Adadelta", "RMSprop"])
@pytest.mark.parametrize("mode", ["eager", "plain"])
def test_no_optimizer_waits(optimizer: str, mode: StepMode) -> None:
    def make(params: Any, b: int) -> torch.optim.Optimizer:
        return getattr(torch.optim, optimizer)(params, lr=0.01 * (1 + b))

    assert settled(mode, lambda b: Net(), make).waits == {}


def test_scaled_gradients_are_looked_at_once_a_step_as_torch_does() -> None:
    assert settled("eager", lambda b: Net(), scaled=True, max_norm=1.0).waits.total() == 1
    assert settled("plain", lambda b: Net(), scaled=True, max_norm=1.0).waits.total() == MEMBERS


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "Adamax": torch.optim.Adamax,
    "Adagrad": partial(torch.optim.Adagrad, lr_decay=0.1),
    "Adam, one tensor after another": partial(torch.optim.Adam, foreach=False, fused=False),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_plain_steps_between_fused_ones_count_on_and_do_not_wait_again(name: str) -> None:
    """The counts stay on the GPU, since a fused step may come next; a plain one reads them once."""
    x, y = torch.randn(5, 6), torch.arange(5) % 4
    alone, waits = [], []
    with PretendedGpu() as gpu:
        for fused in (False, True):
            torch.manual_seed(0)
            models = [Net() for _ in range(MEMBERS)]
            gpu.claim(models, x, y)
            optimizers = [OPTIMIZERS[name](model.parameters(), lr=0.1 * (1 + b)) for b, model in enumerate(models)]
            if fused:
                array = fuse(models, seeds=range(MEMBERS))
                together = fuse_optimizers(optimizers, array)
            for mode in ("eager", "plain", "plain", "plain", "eager", "plain", "eager"):
                for model in models:
                    model.zero_grad()
                if fused and mode == "eager":
                    together.zero_grad()
                    array.map(loss, (x, y)).sum().backward()
                    together.step()
                    continue
                for model in models:
                    loss(model, (x, y)).backward()
                if not fused:
                    for optimizer in optimizers:
                        optimizer.step()
                    continue
                with gpu.counting() as counts:
                    together.step_each(uneven=False)
                waits.append(counts.waits.total())
            alone.append([p.detach().clone() for model in models for p in model.parameters()])
            steps = [mine["step"] for optimizer in optimizers for mine in optimizer.state.values()]
            assert [step.item() for step in steps] == [7] * len(steps)
            assert all(step.is_cuda for step in steps) or not fused
    assert waits == [MEMBERS, 0, 0, MEMBERS]
    for one, other in zip(*alone, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-7)
