"""Pictures: convolutions with batch norm on MNIST and CIFAR-10, a vision transformer, an autoencoder and a GAN."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from models.vit import VisionTransformer
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from search_tasks.search import Supervised

__all__ = ["CIFAR", "GAN", "MNIST", "Autoencoder", "Convolutional", "Perceptron", "Transformer"]

MNIST, CIFAR = "mnist_20k_10k.npz", "cifar10_5k_1k.npz"
NOISE = 16


def pictures(file: Path, part: str, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The first pictures of a set, [count, channels, height, width] within -1 and 1, and their classes."""
    with np.load(file) as arrays:
        x, y = arrays[f"x_{part}"][:count], arrays[f"y_{part}"][:count]
    pixels = torch.tensor(x, dtype=torch.float32) / 127.5 - 1
    pixels = pixels.unsqueeze(1) if pixels.dim() == 3 else pixels.permute(0, 3, 1, 2).contiguous()
    return pixels, torch.tensor(y.astype("int64"))


class Pictures(Supervised):
    """Classes of pictures.

    Args:
        file: Data set.
        train: Number of pictures to train on.
        valid: Number of pictures to validate on.
    """

    def __init__(self, file: Path, train: int, valid: int) -> None:
        self.file, self.train, self.valid = file, train, valid

    def data(self, config):
        counts = {"train": self.train, "test": self.valid}
        return tuple(TensorDataset(*pictures(self.file, part, count)) for part, count in counts.items())

    def eval_batch_size(self, config):
        return 250


class Convolutional(Pictures):
    """Three convolutions with batch norm, and a linear layer."""

    def model(self, config):
        width, channels = config["width"], 1 if self.file.name == MNIST else 3
        layers: list[nn.Module] = []
        for inside, outside in ((channels, width), (width, 2 * width), (2 * width, 2 * width)):
            layers += [nn.Conv2d(inside, outside, 3, stride=2, padding=1), nn.BatchNorm2d(outside), nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(8 * width, 10))


class Perceptron(Pictures):
    """Two hidden layers."""

    def model(self, config):
        width = config["width"]
        return nn.Sequential(
            *(nn.Flatten(), nn.Linear(784, width), nn.ReLU()),
            *(nn.Linear(width, width), nn.ReLU()),
            nn.Linear(width, 10),
        )


class Transformer(Pictures):
    """A vision transformer of 8 x 8 patches of 4 x 4 pixels."""

    def model(self, config):
        return VisionTransformer(
            width=config["width"], depth=config["depth"], heads=4, patches=8, patch=4, predicting=1
        )


class Autoencoder(Pictures):
    """A perceptron that gives back the picture through a narrow layer."""

    def model(self, config):
        narrow = config["latent"]
        return nn.Sequential(
            *(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, narrow)),
            *(nn.Linear(narrow, 128), nn.ReLU(), nn.Linear(128, 784), nn.Tanh()),
        )

    def loss(self, model, batch):
        x, _ = batch
        return F.mse_loss(model(x), x.flatten(1))

    def metrics(self, model, batch):
        return {}


class Both(nn.Module):
    """Generator and discriminator of one trial."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            *(nn.Linear(NOISE, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()), nn.Linear(width, 784), nn.Tanh()
        )
        self.discriminator = nn.Sequential(
            *(nn.Linear(784, width), nn.LeakyReLU(0.2), nn.Linear(width, width), nn.LeakyReLU(0.2)), nn.Linear(width, 1)
        )


class GAN(shoal.Task):
    """A generative adversarial network of perceptrons; "gap" compares the mean of made pictures with that of real ones.

    Args:
        file: MNIST.
        train: Number of pictures to train on.
    """

    def __init__(self, file: Path, train: int) -> None:
        self.file, self.train = file, train

    def data(self, config):
        sets = []
        for part, count in (("train", self.train), ("test", 1000)):
            x, _ = pictures(self.file, part, count)
            noise = torch.randn(len(x), NOISE, generator=torch.Generator().manual_seed(0))
            sets.append(TensorDataset(x.flatten(1), noise))
        return tuple(sets)

    def eval_batch_size(self, config):
        return 1000

    def model(self, config):
        return Both(config["width"])

    def optimizer(self, model, config):
        betas = (config["beta"], 0.999)
        return [
            torch.optim.Adam(model.discriminator.parameters(), lr=config["lr"], betas=betas),
            torch.optim.Adam(model.generator.parameters(), lr=config["lr"], betas=betas),
        ]

    def loss(self, model, batch):
        _, noise = batch
        return F.softplus(-model.discriminator(model.generator(noise))).mean()

    def step(self, model, batch, optimizer):
        real, noise = batch
        of_discriminator, of_generator = optimizer
        made = model.generator(noise)
        of_discriminator.zero_grad()
        loss = F.softplus(-model.discriminator(real)).mean() + F.softplus(model.discriminator(made.detach())).mean()
        loss.backward()
        of_discriminator.step()
        of_generator.zero_grad()
        F.softplus(-model.discriminator(made)).mean().backward()
        of_generator.step()
        return loss

    def metrics(self, model, batch):
        real, noise = batch
        return {"gap": (model.generator(noise).mean(0) - real.mean(0)).abs().mean()}
