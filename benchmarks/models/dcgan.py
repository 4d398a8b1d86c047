"""A generative adversarial network of convolutions, 64 x 64 pixels (Radford et al., arXiv:1511.06434)."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.workload import Batch, Phase, Workload

__all__ = ["workload"]

NOISE = 100


def generator(width: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.ConvTranspose2d(NOISE, 8 * width, 4, 1, 0, bias=False)]
    for factor in (8, 4, 2):
        layers += [
            nn.BatchNorm2d(factor * width),
            nn.ReLU(),
            nn.ConvTranspose2d(factor * width, factor * width // 2, 4, 2, 1, bias=False),
        ]
    return nn.Sequential(
        *layers, nn.BatchNorm2d(width), nn.ReLU(), nn.ConvTranspose2d(width, 3, 4, 2, 1, bias=False), nn.Tanh()
    )


def discriminator(width: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 4, 2, 1, bias=False), nn.LeakyReLU(0.2)]
    for factor in (1, 2, 4):
        layers += [
            nn.Conv2d(factor * width, 2 * factor * width, 4, 2, 1, bias=False),
            nn.BatchNorm2d(2 * factor * width),
            nn.LeakyReLU(0.2),
        ]
    return nn.Sequential(*layers, nn.Conv2d(8 * width, 1, 4, 1, 0, bias=False), nn.Flatten(0))


class DCGAN(nn.Module):
    """Both networks of one member; weights from N(0, 0.02²), as the paper has it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.generator = generator(width)
        self.discriminator = discriminator(width)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
                nn.init.normal_(module.weight, 0.0, 0.02)
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.weight, 1.0, 0.02)

    def forward(self, task: str, images: Tensor, noise: Tensor) -> Tensor:
        """The loss of one of the two networks."""
        fake = self.generator(noise)
        if task == "generator":
            return binary(self.discriminator(fake), real=True)
        return binary(self.discriminator(images), real=True) + binary(self.discriminator(fake.detach()), real=False)


def binary(scores: Tensor, real: bool) -> Tensor:
    target = torch.ones_like(scores) if real else torch.zeros_like(scores)
    return F.binary_cross_entropy_with_logits(scores, target)


def loss(part: str, net: nn.Module, batch: Batch) -> Tensor:
    return net(part, *batch)


def adam(part: str, net: nn.Module, factor: float) -> torch.optim.Optimizer:
    return torch.optim.Adam(net.get_submodule(part).parameters(), lr=2e-4 * factor, betas=(0.5, 0.999))


def batch(samples: int) -> Batch:
    return torch.rand(samples, 3, 64, 64) * 2 - 1, torch.randn(samples, NOISE, 1, 1)


def workload(full: bool) -> Workload:
    samples, width = (128, 64) if full else (4, 8)
    return Workload(
        sizes=f"64x64, N={samples}, width {width}, two Adams",
        samples=samples,
        model=partial(DCGAN, width),
        batch=partial(batch, samples),
        phases=tuple(Phase(partial(loss, part), partial(adam, part)) for part in ("discriminator", "generator")),
    )
