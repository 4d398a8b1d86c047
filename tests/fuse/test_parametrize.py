"""Parametrized weights, by parametrizations and by the older hooks: results equal those of each member alone."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization
from twins import Of, build, check_table, close

from shoal.fuse.api import fuse

torch.manual_seed(4)
X = torch.randn(6, 4, dtype=torch.float64)
IMAGE = torch.randn(3, 4, 5, 5, dtype=torch.float64)


class Symmetric(nn.Module):
    """Without parameters of its own."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


class Scaled(nn.Module):
    """With one."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(()))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


class Positive(nn.Module):
    """Can be inverted, so that a weight can be assigned."""

    def forward(self, x: Tensor) -> Tensor:
        return x.exp()

    def right_inverse(self, x: Tensor) -> Tensor:
        return x.log()


def positive() -> nn.Module:
    layer = nn.Linear(4, 3)
    with torch.no_grad():
        layer.weight.abs_()
    return register_parametrization(layer, "weight", Positive())


def chain() -> nn.Module:
    layer = register_parametrization(nn.Linear(4, 4), "weight", Symmetric())
    return register_parametrization(register_parametrization(layer, "weight", Scaled()), "bias", Scaled())


def cached(model: nn.Module, x: Tensor) -> Tensor:
    with parametrize.cached():
        return model.layer(model.layer(x))


CASES: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "weight norm": (lambda: weight_norm(nn.Linear(4, 3)), X),
    "weight norm of columns": (lambda: weight_norm(nn.Linear(4, 3), dim=1), X),
    "weight norm of all": (lambda: weight_norm(nn.Linear(4, 3), dim=None), X),
    "weight norm of kernels": (lambda: weight_norm(nn.Conv2d(4, 3, 3)), IMAGE),
    "weight norm of a recurrent layer": (
        lambda: Of(lambda m, x: m.rnn(x[None])[0], rnn=weight_norm(nn.LSTM(4, 3), "weight_hh_l0")),
        X,
    ),
    "old weight norm": (lambda: nn.utils.weight_norm(nn.Linear(4, 3)), X),
    "old weight norm of kernels": (lambda: nn.utils.weight_norm(nn.Conv2d(4, 3, 3)), IMAGE),
    "spectral norm": (lambda: spectral_norm(nn.Linear(4, 3)), X),
    "spectral norm of kernels": (lambda: spectral_norm(nn.Conv2d(4, 3, 3), n_power_iterations=2), IMAGE),
    "spectral norm of turned kernels": (lambda: spectral_norm(nn.ConvTranspose2d(4, 3, 3)), IMAGE),
    "spectral norm in evaluation": (lambda: spectral_norm(nn.Linear(4, 3)).eval(), X),
    "old spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(4, 3)), X),
    "old spectral norm of kernels": (lambda: nn.utils.spectral_norm(nn.Conv2d(4, 3, 3)), IMAGE),
    "old spectral norm in evaluation": (lambda: nn.utils.spectral_norm(nn.Linear(4, 3)).eval(), X),
    "orthogonal by exponential": (lambda: orthogonal(nn.Linear(4, 4), orthogonal_map="matrix_exp"), X),
    "orthogonal by Cayley": (lambda: orthogonal(nn.Linear(4, 4), orthogonal_map="cayley"), X),
    "orthogonal by reflections": (lambda: orthogonal(nn.Linear(4, 3), orthogonal_map="householder"), X),
    "orthogonal from zero": (lambda: orthogonal(nn.Linear(4, 3), use_trivialization=False), X),
    "symmetric": (lambda: register_parametrization(nn.Linear(4, 4), "weight", Symmetric()), X),
    "positive": (positive, X),
    "chain": (chain, X),
    "cached": (lambda: Of(cached, layer=weight_norm(nn.Linear(4, 4))), X),
}


@pytest.mark.filterwarnings("ignore:.*`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:.*`torch.nn.utils.spectral_norm` is deprecated:FutureWarning")
def test_parametrized_layers() -> None:
    """Also the power iterations of spectral norms, which change buffers in training."""
    check_table(CASES, members=[3])


def test_members_keep_their_parametrizations() -> None:
    """After the array a member runs alone, takes a weight, and gives its parametrization up, as ever."""
    models, twins = build(positive, 3), build(positive, 3)
    array = fuse(models)
    array(X)
    for b, (member, twin) in enumerate(zip(array.unfuse(), twins, strict=True)):
        for model in (member, twin):
            model.weight = model.weight.detach() + b
        close(member(X), twin(X), f"output of {b}")
        for model in (member, twin):
            parametrize.remove_parametrizations(model, "weight")
        close(member.weight, twin.weight, f"weight of {b}")
        assert type(member) is nn.Linear
