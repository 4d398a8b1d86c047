"""Activations, and layers of pairs of inputs: outputs and gradients equal those of each member alone."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from twins import Make, Of, check, check_table

torch.manual_seed(7)
X = torch.randn(6, 4, dtype=torch.float64)
IMAGE = torch.randn(3, 4, 3, 5, dtype=torch.float64)

ACTIVATIONS: dict[str, Make] = {
    **{
        kind.__name__: kind
        for kind in (
            *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh),
            *(nn.Sigmoid, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Hardshrink, nn.Softshrink, nn.Softplus),
            *(nn.Softsign, nn.Tanhshrink, nn.LogSigmoid, nn.GLU, nn.PReLU, nn.Identity),
        )
    },
    "GELU by tanh": lambda: nn.GELU("tanh"),
    "Threshold": lambda: nn.Threshold(0.1, -2.0),
    "RReLU": lambda: nn.RReLU().eval(),
    "RReLU in place": lambda: nn.RReLU(inplace=True).eval(),
    "Softmax": lambda: nn.Softmax(-1),
    "LogSoftmax": lambda: nn.LogSoftmax(1),
    "Softmin": lambda: nn.Softmin(-1),
    "PReLU of channels": lambda: nn.PReLU(6),
    "ReLU in place": lambda: nn.ReLU(inplace=True),
    "ReLU6 in place": lambda: nn.ReLU6(inplace=True),
    "LeakyReLU in place": lambda: nn.LeakyReLU(0.3, inplace=True),
    "ELU in place": lambda: nn.ELU(0.7, inplace=True),
    "SELU in place": lambda: nn.SELU(inplace=True),
    "CELU in place": lambda: nn.CELU(0.7, inplace=True),
    "SiLU in place": lambda: nn.SiLU(inplace=True),
    "Mish in place": lambda: nn.Mish(inplace=True),
    "Hardtanh in place": lambda: nn.Hardtanh(-0.3, 0.2, inplace=True),
    "Hardsigmoid in place": lambda: nn.Hardsigmoid(inplace=True),
    "Hardswish in place": lambda: nn.Hardswish(inplace=True),
    "Threshold in place": lambda: nn.Threshold(0.1, -2.0, inplace=True),
}


IMAGES: dict[str, tuple[Make, Any]] = {
    "PReLU of images": (nn.PReLU, "images"),
    "PReLU of an image": (nn.PReLU, "an image"),
    "PReLU of channels of images": (lambda: nn.PReLU(4), "images"),
    "Softmax2d": (nn.Softmax2d, "images"),
    "Softmax2d of an image": (nn.Softmax2d, "an image"),
    "GLU of channels": (lambda: nn.GLU(1), "images"),
    "LeakyReLU of images": (nn.LeakyReLU, "images"),
    "PReLU of a row": (nn.PReLU, "a row"),
    "PReLU of a number": (nn.PReLU, "a number"),
    "PReLU of a shared input": (nn.PReLU, X),
}


def _own(start: float) -> float:
    """A number of the member that is being built, whose number is the seed."""
    return start + torch.initial_seed() % 4 / 8


OWN_NUMBERS: dict[str, Make] = {
    "LeakyReLU": lambda: nn.LeakyReLU(_own(0.1)),
    "LeakyReLU in place": lambda: nn.LeakyReLU(_own(0.1), inplace=True),
    "ELU": lambda: nn.ELU(_own(0.5)),
    "CELU": lambda: nn.CELU(_own(0.5)),
    "Softplus": lambda: nn.Softplus(_own(0.5), 1.0 + _own(0.5)),
    "Hardtanh": lambda: nn.Hardtanh(-_own(0.5), _own(0.1)),
    "Hardshrink": lambda: nn.Hardshrink(_own(0.1)),
    "Softshrink": lambda: nn.Softshrink(_own(0.1)),
    "Threshold": lambda: nn.Threshold(_own(0.1), _own(1.0)),
    "RReLU": lambda: nn.RReLU(_own(0.1), _own(0.3)).eval(),
}


FIRSTS: dict[str, tuple[Make, Tensor]] = {
    "rows": (lambda: nn.Linear(4, 6), X),
    "a row": (lambda: nn.Linear(4, 6), X[0]),
    "a number": (lambda: Of(lambda m, x: m.w * x, w=nn.Parameter(torch.randn(()))), X[0, 0]),
    "images": (lambda: nn.Conv2d(4, 4, 1), IMAGE),
    "an image": (lambda: nn.Conv2d(4, 4, 1), IMAGE[0]),
}


def test_activations() -> None:
    check_table({name: (layer, "rows") for name, layer in ACTIVATIONS.items()} | IMAGES, FIRSTS, loops=["rrelu"])


def test_numbers_of_the_members_own() -> None:
    shared = {f"{name} of a shared input": (layer, X) for name, layer in OWN_NUMBERS.items() if "place" not in name}
    check_table({name: (layer, "rows") for name, layer in OWN_NUMBERS.items()} | shared, FIRSTS)


PAIRS: dict[str, Make] = {
    "cosine": lambda: nn.CosineSimilarity(1, 0.1),
    "own eps": lambda: nn.CosineSimilarity(1, _own(0.1)),
    "bilinear": lambda: nn.Bilinear(4, 4, 3),
    "distance": lambda: nn.PairwiseDistance(3.0),
    "own power": lambda: nn.PairwiseDistance(1.0 + _own(0.5)),
}


def test_layers_of_pairs() -> None:
    firsts = {"four": (lambda: nn.Linear(4, 4), X)}
    check_table({name: (layer, "four", X) for name, layer in PAIRS.items()}, firsts)


TARGETS = torch.tensor([1, 4, 9, 2, 3, 8])
ADAPTIVE: dict[str, Callable[[Any, Tensor], Any]] = {
    "loss": lambda m, x: tuple(m(x, TARGETS)),
    "loss of one sample": lambda m, x: tuple(m(x[0], TARGETS[0])),
    "logarithms": lambda m, x: m.log_prob(x),
}


def test_adaptive_softmax() -> None:
    def around(fn: Callable[[Any, Tensor], Any]) -> nn.Module:
        softmax = nn.AdaptiveLogSoftmaxWithLoss(8, 10, [3, 6], div_value=2.0, head_bias=True)
        return Of(lambda m, x: fn(m.softmax, m.first(x)), first=nn.Linear(4, 8), softmax=softmax)

    check_table({name: (partial(around, fn), X) for name, fn in ADAPTIVE.items()})


def test_prediction_by_adaptive_softmax() -> None:
    """What depends on the data is refused."""

    def make() -> nn.Module:
        softmax = nn.AdaptiveLogSoftmaxWithLoss(8, 10, [3, 6], div_value=2.0)
        return Of(lambda m, x: m.softmax.predict(m.first(x)), first=nn.Linear(4, 8), softmax=softmax)

    check(make, X, members=3, refused=True)
