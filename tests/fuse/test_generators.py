"""Default generators: seeds set their states, and draws are detected and undone."""

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from shoal.fuse.generators import DrawDetector, PythonRngSnapshot, preserved_rng, seed_member, seeded

CPU = torch.device("cpu")
DRAWS: dict[str, Callable[[], object]] = {
    "python": random.random,
    "python, a Gaussian": lambda: random.gauss(0, 1),
    "numpy": np.random.random,
    "numpy, one Gaussian of two": np.random.randn,
    "numpy, a whole key": lambda: np.random.bytes(4 * 624),
    "numpy, seeded": lambda: np.random.seed(5),
}
BEFORE: dict[str, Callable[[], object]] = {
    "fresh": lambda: None,
    "a Gaussian is left": lambda: (np.random.randn(), random.gauss(0, 1)),
    "a Gaussian was left": lambda: (np.random.randn(2), random.gauss(0, 1), random.gauss(0, 1)),
}


@pytest.fixture(params=[np.random.MT19937, np.random.PCG64], autouse=True)
def kind(request: pytest.FixtureRequest) -> Iterator[type]:
    own = np.random.get_bit_generator()
    np.random.set_bit_generator(request.param(3))
    random.seed(3)
    yield request.param
    np.random.set_bit_generator(own)


def next_numbers() -> tuple[float, ...]:
    return random.gauss(0, 1), random.random(), np.random.randn(), np.random.randn(), np.random.random()


@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("draw", DRAWS)
def test_what_is_drawn_is_seen_and_taken_back(before: str, draw: str, kind: type) -> None:
    if draw == "numpy, seeded" and kind is not np.random.MT19937:
        pytest.skip("NumPy seeds a Mersenne Twister only")
    BEFORE[before]()
    others = PythonRngSnapshot()
    assert not others.has_drawn()
    expected = next_numbers()
    assert others.has_drawn()
    others.restore()
    others = PythonRngSnapshot()
    assert not others.has_drawn()
    DRAWS[draw]()
    assert others.has_drawn()
    others.restore()
    assert next_numbers() == expected


@pytest.mark.parametrize("draw", [torch.randn, lambda n: torch.randperm(n), lambda n: torch.manual_seed(n)])
def test_what_is_drawn_of_torch_is_seen_and_taken_back(draw: Callable[[int], object]) -> None:
    drawn = DrawDetector(CPU)
    assert not drawn()
    expected = torch.rand(3)
    assert drawn()
    drawn.restore()
    assert not drawn()
    with preserved_rng(CPU):
        draw(3)
    assert torch.equal(torch.rand(3), expected)


def test_each_member_draws_what_it_would_draw_alone(kind: type) -> None:
    if kind is not np.random.MT19937:
        pytest.skip("NumPy seeds a Mersenne Twister only")

    def numbers() -> list[float]:
        return [torch.rand(()).item(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]

    with seeded([7, 7], CPU):
        first = numbers()
        seed_member(1)
        assert numbers() == first
        with seeded([8, 9], CPU):
            assert numbers() != first
        seed_member(1)
        assert numbers() == first
        after = numbers()
    with seeded([7, 7], CPU):
        numbers()
        seen = numbers()
    assert seen == after
    seed_member(1)
    assert numbers() != first, "outside of it nobody is seeded"
