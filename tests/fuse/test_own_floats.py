"""A member's own float among other numbers stays a Python float; what takes no such float is refused."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn

from shoal.core.errors import FusionError
from shoal.fuse.api import fuse

RATES = (0.1, 0.3, 0.7)


class Warm(nn.Module):
    """A rate of its own, and a count in single precision."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 4.0, dtype=torch.float64))
        self.rate = rate
        self.register_buffer("count", torch.tensor(3.0))


def in_place(m: Any) -> Tensor:
    rate = m.rate
    rate /= m.count.item()
    rate += 1
    return m.weight * rate * m.rate


NUMBERS: dict[str, Callable[[Any], Tensor]] = {
    "quotient": lambda m: m.weight * (m.rate / m.count.item()),
    "corrected": lambda m: m.weight * (m.rate / (1 - 0.9 ** m.count.item())),
    "keyword": lambda m: m.weight.add(m.weight, alpha=m.rate / (1 - 0.9 ** m.count.item())),
    "reflected": lambda m: m.weight * (m.count.item() / m.rate),
    "two of them": lambda m: m.weight * (m.rate / (m.rate + 2)),
    "whole": lambda m: m.weight * (m.count.item() // m.rate),
    "remainder": lambda m: m.weight * (1 % m.rate),
    "power": lambda m: m.weight * m.rate**-0.5,
    "exponent": lambda m: m.weight * 0.1**m.rate,
    "negative": lambda m: m.weight * abs(-m.rate / 7),
    "boolean": lambda m: m.weight * (m.rate / 3 * True),
    "truth": lambda m: m.weight * m.rate / 3 if m.rate else m.weight,
    "in place": in_place,
    "full": lambda m: m.weight * torch.full((3,), m.rate / 3, dtype=torch.float64),
    "where": lambda m: torch.where(m.weight > 2, m.weight, m.rate / 3),
}


REFUSED: dict[str, Callable[[Any], Tensor]] = {
    "complex": lambda m: m.weight * abs((-m.rate) ** 0.5),
    "compared": lambda m: m.weight * 2 if m.rate > 0.2 else m.weight,
    "larger": lambda m: m.weight * max(m.rate, 0.2),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_arithmetic_is_pythons(name: str) -> None:
    use = NUMBERS[name]
    models = [Warm(rate) for rate in RATES]
    want = torch.stack([use(model).detach() for model in models])
    array = fuse(copy.deepcopy(models))
    torch.testing.assert_close(array.map(use).detach(), want, rtol=1e-15, atol=0)


@pytest.mark.parametrize("name", REFUSED)
def test_what_differs_in_kind_is_refused(name: str) -> None:
    array = fuse([Warm(rate) for rate in RATES])
    with pytest.raises(FusionError, match=r"\(test_own_floats\.py:\d+\): a plain value .*array\.unfuse\(\)"):
        array.map(REFUSED[name])


DISTRIBUTIONS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "normal": lambda x, r: distributions.Normal(x, r).rsample(),
    "normal of numbers": lambda x, r: x + distributions.Normal(0.0, r).sample((3,)),
    "density": lambda x, r: distributions.Normal(r, 1.0).log_prob(x),
    "laplace": lambda x, r: distributions.Laplace(x, r).rsample(),
    "gamma": lambda x, r: distributions.Gamma(x, r).rsample(),
    "beta": lambda x, r: distributions.Beta(x, r).rsample(),
    "uniform": lambda x, r: distributions.Uniform(x - r, x + r).rsample(),
    "bernoulli": lambda x, r: x * distributions.Bernoulli(r).sample((3,)),
    "relaxed": lambda x, r: distributions.RelaxedBernoulli(r, logits=x).rsample(),
    "divergence": lambda x, r: distributions.kl_divergence(distributions.Normal(x, r), distributions.Normal(0.0, 1.0)),
    "transformed": lambda x, r: distributions.TransformedDistribution(
        distributions.Normal(x, 1.0), [distributions.AffineTransform(r, 2.0)]
    ).rsample(),
    "broadcast": lambda x, r: torch.distributions.utils.broadcast_all(x, r)[1] * x,
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_distribution_of_an_own_float(name: str) -> None:
    """Each member draws what it draws alone; most distributions take no such float, and are refused."""
    models = [Warm(rate) for rate in RATES]

    def draw(model: Any) -> Tensor:
        return DISTRIBUTIONS[name](model.weight, model.rate)

    array = fuse(copy.deepcopy(models), range(3))
    if name not in ("relaxed", "transformed", "uniform"):
        with pytest.raises(FusionError, match=r"test_own_floats\.py:\d+\): .*array\.unfuse\(\)"):
            array.map(draw)
        return
    alone = [fuse([copy.deepcopy(model)], [b]).map(draw)[0] for b, model in enumerate(models)]
    torch.testing.assert_close(array.map(draw).detach(), torch.stack(alone).detach(), rtol=1e-9, atol=1e-12)


def test_an_error_is_raised_as_it_is() -> None:
    def wrong(model: Any) -> Tensor:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fuse([Warm(rate) for rate in RATES]).map(wrong)
