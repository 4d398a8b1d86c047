"""Tasks of studies on a real GPU; apart from the tests, since workers import this module."""

from typing import Any

import cloudpickle
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import shoal


class Small(shoal.Task):
    """Three clouds of points; double precision, so that step modes agree."""

    @classmethod
    def pickled(cls) -> bytes:
        content: bytes = cloudpickle.dumps(cls())
        return content

    def data(self, config: Any) -> Any:
        generator = torch.Generator().manual_seed(0)
        y = torch.randint(0, 3, (160,), generator=generator)
        x = F.one_hot(y, 6).double() + 0.3 * torch.randn(160, 6, generator=generator, dtype=torch.float64)
        return TensorDataset(x[:120], y[:120]), TensorDataset(x[120:], y[120:])

    def model(self, config: Any) -> nn.Module:
        width = config.get("width", 8)
        return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Dropout(0.1), nn.Linear(width, 3)).double()

    def optimizer(self, model: nn.Module, config: Any) -> Any:
        return torch.optim.Adam(model.parameters(), lr=config["lr"], eps=1e-3)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).double().mean()}

    def batch_size(self, config: Any) -> int:
        return 16


class Clipped(Small):
    """With a limit of the norm of gradients and rates of dropout of its own for each trial."""

    def model(self, config: Any) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(config["rate"]), nn.Linear(8, 3)).double()

    def clip_norm(self, config: Any) -> float:
        return 0.5


class Half(Small):
    """In the precision that the configuration names."""

    def model(self, config: Any) -> nn.Module:
        return super().model(config).float()

    def precision(self, config: Any) -> str:
        precision: str = config["precision"]
        return precision

    def data(self, config: Any) -> Any:
        return [TensorDataset(part.tensors[0].float(), part.tensors[1]) for part in super().data(config)]


class Greedy(Small):
    """Trials of width 9 ask for more memory than any GPU has, in training."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        if model.training and batch[0].is_cuda and model[0].out_features == 9:
            torch.empty(1 << 50, device=batch[0].device)
        return super().loss(model, batch)
