"""Factories of optimizers whose settings differ between members, with and without a fused rule."""

from collections.abc import Callable
from typing import Any

import torch
from optim_twins import Make
from torch import nn
from torch.optim import SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

LOWERINGS = ("kernels", "elementwise")


def plain(cls: type[Optimizer], **options: Any) -> Make:
    """An optimizer of all parameters; a callable option is given the member's index."""

    def make(model: nn.Module, b: int) -> Optimizer:
        return cls(model.parameters(), **{k: v(b) if callable(v) else v for k, v in options.items()})

    return make


def grouped(cls: type[Optimizer], first: dict[str, Any], second: dict[str, Any]) -> Make:
    """Biases in a group of their own, and `scale` in none."""

    def make(model: nn.Module, b: int) -> Optimizer:
        groups = [{"params": [model.weight, model.unused], **first}, {"params": [model.bias], **second}]
        return cls([{k: v(b) if callable(v) else v for k, v in group.items()} for group in groups])

    return make


def lr(b: int) -> float:
    return 0.1 / (b + 1)


def betas(b: int) -> tuple[float, float]:
    return 0.9 - 0.05 * b, 0.999 - 0.01 * b


def eps(b: int) -> float:
    return 10.0 ** -(b + 3)


RULES: dict[str, Make] = {
    "sgd": plain(SGD, lr=lr),
    "sgd-decay": plain(SGD, lr=lr, weight_decay=lambda b: 0.1 * b),
    "sgd-momentum": plain(SGD, lr=lr, momentum=lambda b: 0.5 + 0.05 * b, weight_decay=lambda b: 0.01 * b),
    "sgd-dampening": plain(SGD, lr=lr, momentum=0.9, dampening=lambda b: 0.1 * b),
    "sgd-nesterov": plain(SGD, lr=lr, momentum=lambda b: 0.9 - 0.05 * b, nesterov=True, weight_decay=0.01),
    "sgd-maximize": plain(SGD, lr=lr, momentum=0.9, weight_decay=0.01, maximize=True),
    "sgd-foreach": plain(SGD, lr=lr, momentum=0.9, foreach=True),
    "sgd-fused": plain(SGD, lr=lr, momentum=0.9, fused=True),
    "sgd-tensor-lr": plain(SGD, lr=lambda b: torch.tensor(lr(b), dtype=torch.float64)),
    "sgd-groups": grouped(SGD, {"lr": lr, "momentum": 0.9}, {"lr": 0.3, "nesterov": True, "momentum": 0.5}),
    "adam": plain(Adam, lr=lr),
    "adam-numbers": plain(
        Adam,
        lr=lr,
        betas=betas,
        eps=eps,
        weight_decay=lambda b: 0.1 * b,
    ),
    "adam-amsgrad": plain(Adam, lr=lr, amsgrad=True, betas=lambda b: (0.9, 0.5 + 0.05 * b)),
    "adam-maximize": plain(Adam, lr=lr, maximize=True, weight_decay=0.1),
    "adam-decoupled": plain(Adam, lr=lr, decoupled_weight_decay=True, weight_decay=lambda b: 0.1 * b),
    "adam-foreach": plain(Adam, lr=lr, foreach=True),
    "adam-tensors": plain(
        Adam,
        lr=lambda b: torch.tensor([lr(b)], dtype=torch.float64),
        betas=lambda b: (torch.tensor(0.8, dtype=torch.float64), torch.tensor(0.95, dtype=torch.float64)),
    ),
    "adam-groups": grouped(Adam, {"lr": lr}, {"lr": 0.01, "amsgrad": True, "weight_decay": lambda b: 0.1 * b}),
    "adamw": plain(AdamW, lr=lr, weight_decay=lambda b: 0.1 * b),
    "adamw-amsgrad": plain(AdamW, lr=lr, amsgrad=True, maximize=True),
    "adamw-fused": plain(AdamW, lr=lr, fused=True),
    "adamw-equal": plain(AdamW, lr=0.1),
    "adamw-equal-in-part": plain(AdamW, lr=lambda b: 0.1 if b < 3 else 0.2),
    "adamax": plain(Adamax, lr=lr, betas=betas, eps=eps, weight_decay=lambda b: 0.1 * b),
    "adamax-maximize": plain(Adamax, lr=lr, maximize=True, foreach=True),
    "nadam": plain(NAdam, lr=lr, betas=betas, eps=eps, momentum_decay=lambda b: 0.01 * (b + 1)),
    "nadam-decay": plain(NAdam, lr=lr, weight_decay=lambda b: 0.1 * b, maximize=True),
    "nadam-decoupled": plain(NAdam, lr=lr, decoupled_weight_decay=True, weight_decay=lambda b: 0.1 * b),
    "radam": plain(RAdam, lr=lr, betas=betas, eps=eps),
    "radam-decay": plain(RAdam, lr=lr, weight_decay=lambda b: 0.1 * b, maximize=True, foreach=True),
    "radam-decoupled": plain(RAdam, lr=lr, decoupled_weight_decay=True, weight_decay=lambda b: 0.1 * b),
    "radam-never-rectified": plain(RAdam, lr=lr, betas=(0.9, 0.6), eps=0.0),
    "adagrad": plain(Adagrad, lr=lr, lr_decay=lambda b: 0.1 * b, eps=eps, weight_decay=lambda b: 0.1 * b),
    "adagrad-initial": plain(Adagrad, lr=lr, initial_accumulator_value=lambda b: 0.5 * b, maximize=True),
    "adagrad-fused": plain(Adagrad, lr=lr, fused=True),
    "adadelta": plain(Adadelta, lr=lr, rho=lambda b: 0.95 - 0.05 * b, eps=eps, weight_decay=lambda b: 0.1 * b),
    "adadelta-maximize": plain(Adadelta, lr=lr, maximize=True, foreach=True),
    "rmsprop": plain(RMSprop, lr=lr, alpha=lambda b: 0.99 - 0.05 * b, eps=eps, weight_decay=lambda b: 0.1 * b),
    "rmsprop-momentum": plain(RMSprop, lr=lr, momentum=lambda b: 0.9 - 0.05 * b, maximize=True),
    "rmsprop-centered": plain(RMSprop, lr=lr, centered=True, foreach=True),
    "rmsprop-groups": grouped(RMSprop, {"lr": lr}, {"lr": 0.01, "centered": True, "momentum": 0.5}),
}


def alternate(*makes: Make) -> Make:
    return lambda model, b: makes[b % len(makes)](model, b)


class Doubled(SGD):
    """A subclass whose step is its own."""

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        super().step(closure)
        return super().step(closure)


OTHERS: dict[str, Make] = {
    "momentum-of-some": plain(SGD, lr=lr, momentum=lambda b: 0.9 * (b % 2)),
    "nesterov-of-some": plain(SGD, lr=lr, momentum=0.9, nesterov=lambda b: b > 1),
    "amsgrad-of-some": plain(Adam, lr=lr, amsgrad=lambda b: b in (1, 2)),
    "classes": alternate(RULES["adam"], RULES["sgd-momentum"], RULES["adamw"]),
    "groups-of-some": alternate(RULES["adam"], RULES["adam-groups"]),
    "empty-group": lambda model, b: SGD([{"params": []}, {"params": [model.weight], "lr": lr(b)}]),
    "rule-of-some": alternate(RULES["adam"], plain(torch.optim.Rprop, lr=0.01)),
    "moments-of-some": plain(RMSprop, lr=lr, centered=lambda b: b % 2, momentum=lambda b: 0.5 * (b > 2)),
    "asgd": plain(torch.optim.ASGD, lr=lr, t0=2),
    "rprop": plain(torch.optim.Rprop, lr=lr),
    "adafactor": plain(torch.optim.Adafactor, lr=lr),
    "muon": lambda model, b: torch.optim.Muon([model.weight], lr=lr(b)),
    "subclass": plain(Doubled, lr=lr, momentum=0.9),
}
