"""Dropout of every kind: a member's masks do not depend on the rates of the other members."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from looped_functions import in_loops
from torch import Tensor, nn
from twins import Of, build

from shoal.fuse.api import fuse
from shoal.fuse.stacked import Stacked

INPUTS = {
    0: torch.linspace(-1, 2, 24, dtype=torch.float64).view(6, 4),
    1: torch.linspace(-1, 2, 60, dtype=torch.float64).view(3, 4, 5),
    2: torch.linspace(-1, 2, 96, dtype=torch.float64).view(3, 4, 2, 4),
    3: torch.linspace(-1, 2, 96, dtype=torch.float64).view(2, 4, 3, 2, 2),
}
KINDS: dict[str, tuple[int, Callable[..., nn.Module]]] = {
    "plain": (0, nn.Dropout),
    "in place": (0, lambda p: nn.Dropout(p, inplace=True)),
    "channels 1d": (1, nn.Dropout1d),
    "channels 2d": (2, nn.Dropout2d),
    "channels 3d": (3, nn.Dropout3d),
    "alpha": (0, nn.AlphaDropout),
    "alpha in place": (0, lambda p: nn.AlphaDropout(p, inplace=True)),
    "alpha of channels": (2, nn.FeatureAlphaDropout),
}
RATES = [0.0, 0.3, 1.0, 0.6, 0.1, 0.0, 0.5, 0.9, 0.2, 0.7]
"""Of the members; one that drops nothing draws nothing."""

Make = Callable[[], nn.Module]


class Scale(nn.Module):
    """Weights without random numbers between two dropouts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


def twice(layer: Callable[..., nn.Module], rates: list[float]) -> Make:
    """The second one's masks show how often the first one has drawn."""
    return lambda: nn.Sequential(Scale(), layer(rates[torch.initial_seed() % 10]), Scale(), layer(0.5))


def compare_with_members_alone(make: Make, x: Tensor, members: int) -> None:
    array = fuse(build(make, members), range(members))
    singles = [fuse([model], [b]) for b, model in enumerate(build(make, members))]
    for _ in range(2):
        together = array(x)
        together.square().sum().backward()
        for b, single in enumerate(singles):
            own = single(x)
            own.square().sum().backward()
            torch.testing.assert_close(together[b], own[0], rtol=1e-9, atol=1e-9)
            for mine, alone in zip(array.parameters(), single.parameters(), strict=True):
                torch.testing.assert_close(mine.grad[b], alone.grad[0], rtol=1e-9, atol=1e-9)


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("members", [1, 3])
@pytest.mark.parametrize("rates", [[0.4] * 10, RATES], ids=["one rate", "own rates"])
@pytest.mark.parametrize("name", KINDS)
def test_a_member_drops_the_same_alone_and_in_company(name: str, rates: list[float], members: int) -> None:
    axes, layer = KINDS[name]
    with in_loops() as found:
        compare_with_members_alone(twice(layer, rates), INPUTS[axes], members)
    assert not found


@pytest.mark.parametrize("name", [name for name in KINDS if "in place" not in name])
def test_a_shared_input_is_dropped_at_own_rates(name: str) -> None:
    axes, layer = KINDS[name]

    def make() -> nn.Module:
        return nn.Sequential(layer(RATES[torch.initial_seed() % 10]), Scale(), nn.Dropout())

    with in_loops() as found:
        compare_with_members_alone(make, INPUTS[axes], 3)
    assert not found


def test_slopes_drawn_by_a_member_are_the_same_alone_and_in_company() -> None:
    compare_with_members_alone(lambda: nn.Sequential(Scale(), nn.RReLU(), Scale(), nn.Dropout()), INPUTS[0], 5)


def test_a_rate_of_zero_in_a_function_that_runs_in_a_loop() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        return F.dropout(torch.feature_dropout(m.scale(x), m.rate, True), 0.5)

    def make() -> nn.Module:
        return Of(run, scale=Scale(), rate=RATES[torch.initial_seed() % 10])

    compare_with_members_alone(make, INPUTS[2], 3)


def test_attention_of_which_a_member_drops_nothing() -> None:
    def run(m: Any, x: Tensor) -> Tensor:
        q = m.scale(x).unsqueeze(0)
        return F.dropout(F.scaled_dot_product_attention(q, q, q, dropout_p=m.rate), 0.5)

    def make() -> nn.Module:
        return Of(run, scale=Scale(), rate=RATES[torch.initial_seed() % 10])

    compare_with_members_alone(make, INPUTS[1], 3)


@pytest.mark.parametrize("name", KINDS)
def test_evaluation_drops_nothing(name: str) -> None:
    axes, layer = KINDS[name]
    x = INPUTS[axes]
    array = fuse([nn.Sequential(nn.Identity(), layer(rate)) for rate in RATES[:3]], [1, 2, 3]).eval()
    assert torch.equal(array(Stacked(x.expand(3, *x.shape))), x.expand(3, *x.shape))


CHANNELS: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], tuple[int, ...]]] = {
    "1d": (F.dropout1d, (64, 32, 3), (2,)),
    "1d of one sample": (F.dropout1d, (512, 3), (1,)),
    "2d": (F.dropout2d, (64, 32, 3, 2), (2, 3)),
    "2d of three axes": (F.dropout2d, (64, 32, 3), (2,)),
    "3d": (F.dropout3d, (64, 32, 2, 2, 2), (2, 3, 4)),
    "3d of one sample": (F.dropout3d, (512, 2, 2, 2), (1, 2, 3)),
    "alpha": (F.feature_alpha_dropout, (64, 32, 3, 2), (2, 3)),
}


@pytest.mark.parametrize("name", CHANNELS)
def test_channels_are_dropped_whole_and_apart_from_each_other(name: str) -> None:
    drop, shape, spatial = CHANNELS[name]
    whole = drop(Stacked(torch.ones(2, *shape)), 0.25, True).whole
    flat = whole.flatten(whole.dim() - len(spatial))
    assert torch.equal(flat.amin(-1), flat.amax(-1))
    kept = flat[..., 0] > 0.5
    assert kept.double().mean().item() == pytest.approx(0.75, abs=0.06)
    if kept.dim() == 3:
        assert 0 < kept[0, 0].sum() < kept.shape[-1], "all channels of a sample have one fate"
    assert not torch.equal(kept[0], kept[1])


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_alpha_dropout_keeps_mean_and_variance(rate: float) -> None:
    x = torch.randn(2, 100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    out = F.alpha_dropout(Stacked(x), rate, True).whole
    assert out.mean(1).abs().max() < 0.02
    assert (out.std(1) - 1).abs().max() < 0.02
    alpha = 1.0507009873554805 * 1.6732632423543772
    gain = 1 / math.sqrt((1 - rate) * (1 + rate * alpha**2))
    dropped = (out + gain * alpha * (1 - rate)).abs() < 1e-6
    torch.testing.assert_close(out[~dropped], (gain * x + gain * alpha * rate)[~dropped], rtol=1e-6, atol=1e-6)
    assert dropped.double().mean().item() == pytest.approx(rate, abs=0.01)
