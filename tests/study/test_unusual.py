"""Legal PyTorch that is unusual: trained in an array or not, a trial is what it is alone, or a plain loop."""

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from plain import tune
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset, random_split

import shoal
from shoal.core.demand import Profile
from shoal.core.device import Cluster
from shoal.plan.schedule.base import JobView, Plan, Policy
from shoal.plan.schedule.knapsack import Fifo
from shoal.train import run
from shoal.train.data.batches import Batches
from shoal.train.profile import measure


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays as large as there are trials, whatever the machine is busy with."""

    def measured(*arguments: Any) -> Profile:
        return replace(measure(*arguments), step_seconds={1: 1e-3, 16: 1e-3})

    monkeypatch.setattr(run, "measure", measured)


class Unusual(shoal.Task):
    """Regression on 12 numbers; `lr` differs, and what is unusual is in the functions given.

    Args:
        change: what is done to a new model.
        loss_of: in place of the mean squared error.
    """

    def __init__(
        self, change: Callable[[nn.Module], Any] | None = None, loss_of: Callable[..., Tensor] | None = None
    ) -> None:
        self.change, self.loss_of = change, loss_of

    def data(self, config: Any) -> tuple[Dataset[Any], Dataset[Any]]:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(12, 3, dtype=torch.float64, generator=generator)
        return TensorDataset(x, x.sum(1, keepdim=True)), TensorDataset(x[:5], x[:5].sum(1, keepdim=True))

    def model(self, config: Any) -> nn.Module:
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        if self.change is not None:
            self.change(model)
        return model

    def optimizer(self, model: nn.Module, config: Any) -> Optimizer:
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    def batch_size(self, config: Any) -> int:
        return 4

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if self.loss_of is not None:
            return self.loss_of(model, batch)
        return F.mse_loss(model(batch[0]), batch[1])


class Plain(Unusual):
    """The same by a `step` of its own, and so in plain PyTorch."""

    def step(self, model: nn.Module, batch: Any, optimizer: Optimizer) -> Tensor:
        return super().step(model, batch, optimizer)


def gradient_hook(model: nn.Module) -> None:
    model[0].weight.register_hook(lambda grad: grad * 3)


def accumulated_hook(model: nn.Module) -> None:
    def triple(parameter: Tensor) -> None:
        parameter.grad.mul_(3)

    model[0].weight.register_post_accumulate_grad_hook(triple)


def closing_hook(model: nn.Module) -> None:
    first = model[0]
    model[2].register_forward_pre_hook(lambda module, inputs: (inputs[0] + first.bias,))


def one_memory(model: nn.Module) -> None:
    model[2].weight = nn.Parameter(model[0].bias.data[None])


def in_place(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0].mul_(1.1)), batch[1])


def clamped(model: nn.Module, batch: Any) -> Tensor:
    for parameter in model.parameters():
        parameter.data = parameter.data.clamp(-0.3, 0.3)
    return F.mse_loss(model(batch[0]), batch[1])


def taught(model: nn.Module, batch: Any) -> Tensor:
    teacher = copy.deepcopy(model)
    with torch.no_grad():
        wanted = teacher(batch[0])
    return F.mse_loss(model(batch[0]), batch[1]) + F.mse_loss(model(batch[0] * 2), wanted)


def layer_drop(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0]) * (1.0 if torch.rand(()) < 0.5 else 0.5), batch[1])


def other_noise(model: nn.Module, batch: Any) -> Tensor:
    return F.mse_loss(model(batch[0] + np.random.randn() * 0.1 + random.random() * 0.1), batch[1])


def noise_apart(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0] + np.random.randn() * 0.1)
    return F.mse_loss(out if float(out.detach().sum()) > 0 else out * 2, batch[1])


def remembering(model: nn.Module, batch: Any) -> Tensor:
    out = model(batch[0])
    if model.training:
        model.ema = 0.9 * getattr(model, "ema", 0.0) + 0.1 * out.mean().item()
    return F.mse_loss(out * (1 + getattr(model, "ema", 0.0)), batch[1])


def recomputed(model: nn.Module, batch: Any) -> Tensor:
    hidden = checkpoint(lambda x: F.dropout(model[0](x), 0.5, model.training), batch[0], use_reentrant=False)
    return F.mse_loss(model[2](hidden), batch[1])


AS_PLAIN: dict[str, dict[str, Any]] = {
    "hook of a gradient": {"change": gradient_hook},
    "hook after accumulation": {"change": accumulated_hook},
    "hook that closes over the model": {"change": closing_hook},
    "batch changed in place": {"loss_of": in_place},
    "parameter data replaced": {"loss_of": clamped},
    "copy of the model": {"loss_of": taught},
    "parameters in one memory": {"change": one_memory},
    "nothing unusual": {},
}
AS_ALONE: dict[str, dict[str, Any]] = {
    "a drawn scalar": {"loss_of": layer_drop},
    "noise of NumPy and Python": {"loss_of": other_noise},
    "noise, and members apart": {"loss_of": noise_apart},
    "state on the model": {"loss_of": remembering},
    "checkpointing with dropout": {"loss_of": recomputed},
}
RATES = [0.01, 0.05, 0.1]


def losses(task: shoal.Task, directory: Path, rates: list[float] | float) -> list[float]:
    space = {"lr": shoal.grid(rates) if isinstance(rates, list) else rates}
    study = tune(task, space, directory, metric="valid_loss", mode="min", algorithm=shoal.Grid(epochs=3))
    assert {row.state for row in study.trials} == {"complete"}, [row.reason for row in study.trials]
    return [row.metrics["valid_loss"] for row in study.trials]


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("kind", AS_PLAIN.values(), ids=AS_PLAIN)
def test_fused_or_not_it_is_a_plain_loop(kind: dict[str, Any], tmp_path: Path) -> None:
    fused = losses(Unusual(**kind), tmp_path / "fused", RATES)
    assert fused == pytest.approx(losses(Plain(**kind), tmp_path / "plain", RATES), rel=1e-9)


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("kind", AS_ALONE.values(), ids=AS_ALONE)
def test_company_makes_no_difference(kind: dict[str, Any], tmp_path: Path) -> None:
    together = losses(Unusual(**kind), tmp_path / "together", RATES)
    first = losses(Unusual(**kind), tmp_path / "alone", RATES[:1])
    assert together[:1] == pytest.approx(first, rel=1e-9)


def test_sparse_gradients_are_trained_apart(tmp_path: Path) -> None:
    class Sparse(Unusual):
        def model(self, config: Any) -> nn.Module:
            return nn.Embedding(5, 1, sparse=True, dtype=torch.float64)

        def optimizer(self, model: nn.Module, config: Any) -> Optimizer:
            return torch.optim.SparseAdam(list(model.parameters()), lr=config["lr"])

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return F.mse_loss(model((batch[0][:, 0].abs() * 2).long().clamp(max=4)), batch[1])

    found = losses(Sparse(), tmp_path / "study", RATES)
    assert len(set(found)) == len(RATES)


def test_numpy_numbers_in_a_scheduler_are_read_back(tmp_path: Path) -> None:
    class Cosine(Unusual):
        def scheduler(self, optimizer: Optimizer, config: Any) -> Any:
            return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5 * (1 + np.cos(epoch / 4)))

    study = tune(
        Cosine(), {"lr": shoal.uniform(0.01, 0.1)}, tmp_path / "study", metric="valid_loss", mode="min",
        algorithm=shoal.Hyperband(max_epochs=4, eta=2),
    )  # fmt: skip
    assert {str(row.state) for row in study.trials} == {"complete", "stopped"}


def test_a_data_set_that_keeps_its_config_is_not_shared(tmp_path: Path) -> None:
    class Scaled(Dataset[Any]):
        def __init__(self, config: Any) -> None:
            self.config = config

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            x = torch.full((3,), index / 8, dtype=torch.float64) * self.config["scale"]
            return x, x.sum(0, keepdim=True)

    class Keeping(Unusual):
        def data(self, config: Any) -> Any:
            return Scaled(config), Scaled(config)

    study = tune(
        Keeping(), {"lr": 0.0, "scale": shoal.grid([1.0, 10.0])}, tmp_path / "study", metric="valid_loss", mode="min",
        algorithm=shoal.Grid(epochs=1),
    )  # fmt: skip
    small, large = (row.metrics["valid_loss"] for row in study.trials)
    assert large > 10 * small


def test_parts_of_tensor_data_sets_lie_on_the_device() -> None:
    whole = TensorDataset(torch.arange(10), torch.arange(10) * 2)
    part, _ = random_split(whole, [6, 4], generator=torch.Generator().manual_seed(0))
    batches = Batches(part, torch.device("cpu"), "training")
    assert batches._resident is not None
    (got,) = batches.iterate(6)
    assert got[0].tolist() == list(part.indices)
    assert torch.equal(got[1], got[0] * 2)


class Mine(Policy):
    def plan(self, jobs: Any, cluster: Cluster, now: float) -> Plan:
        assert all(isinstance(job, JobView) for job in jobs)
        return Fifo().plan(jobs, cluster, now)


def test_a_policy_of_the_users_own_is_resumed(tmp_path: Path) -> None:
    tune(
        Unusual(), {"lr": 0.1}, tmp_path / "s", metric="valid_loss", mode="min", algorithm=shoal.Grid(1), policy=Mine()
    )
    assert len(shoal.resume(tmp_path / "s", show_progress=False).trials) == 1
