"""The two tasks of HFTA's tuner HFHT, with the ranges of table 12 but for smaller batches and periods of a fifth.

PointNet classifies unit balls of four norms by 64 of their points, MobileNet (V2 or V3-Large, a quarter as wide)
pictures of CIFAR-10.
"""

import torch
from models import pointnet
from models.mobilenet import mobilenet_v2, mobilenet_v3_large
from torch.utils.data import TensorDataset

import shoal
from search_tasks.pictures import Pictures
from search_tasks.search import Supervised

__all__ = ["SPACE", "MobileNet", "PointNet"]

SPACE = {
    "lr": shoal.loguniform(1e-4, 1e-2),
    "beta1": shoal.uniform(0.001, 0.999),
    "beta2": shoal.uniform(0.001, 0.999),
    "weight_decay": shoal.uniform(0.0, 0.5),
    "factor": shoal.uniform(0.1, 0.9),
    "period": shoal.choice([1, 2, 4, 8]),
}


class Tuned(Supervised):
    """Adam, whose learning rate falls by a factor after each period."""

    def optimizer(self, model, config):
        betas = (config["beta1"], config["beta2"])
        return torch.optim.Adam(model.parameters(), config["lr"], betas, weight_decay=config["weight_decay"])

    def scheduler(self, optimizer, config):
        return torch.optim.lr_scheduler.StepLR(optimizer, config["period"], config["factor"])


class PointNet(Tuned):
    """A classifier of clouds: `train` of them to train on, `valid` to validate on."""

    NORMS = (1.0, 2.0, 4.0, 16.0)

    def __init__(self, train: int, valid: int) -> None:
        self.counts = (train, valid)

    def data(self, config):
        return tuple(TensorDataset(*self.clouds(count, seed)) for seed, count in enumerate(self.counts))

    def clouds(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        y = torch.arange(count) % len(self.NORMS)
        norm = torch.tensor(self.NORMS)[y].view(-1, 1, 1)
        points = torch.randn(count, 3, 64, generator=generator)
        return points / points.abs().pow(norm).sum(1, keepdim=True).pow(1 / norm), y

    def model(self, config):
        return pointnet.Classifier(16, config["transform"])

    def loss(self, model, batch):
        return pointnet.loss(model, batch)

    def metrics(self, model, batch):
        x, y = batch
        return {"accuracy": (model(x)[0].argmax(1) == y).float().mean()}


class MobileNet(Tuned, Pictures):
    """A classifier of pictures, of one of two versions."""

    eval_batch_size = Supervised.eval_batch_size

    def model(self, config):
        return (mobilenet_v2 if config["version"] == "V2" else mobilenet_v3_large)(0.25)
