"""Whether Python's and NumPy's default generators moved is seen, and they are brought back to the number."""

import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from shoal.fuse import twisters
from shoal.fuse.generators import OtherGenerators

DRAWS: dict[str, Callable[[], object]] = {
    "python": random.random,
    "python, a Gaussian": lambda: random.gauss(0, 1),
    "numpy": np.random.random,
    "numpy, one Gaussian of two": np.random.randn,
    "numpy, both": lambda: np.random.randn(2),
    "numpy, a whole key": lambda: np.random.bytes(4 * 624),
    "numpy, a binomial": lambda: np.random.binomial(9, 0.3),
    "numpy, seeded": lambda: np.random.seed(5),
}
BEFORE: dict[str, Callable[[], object]] = {
    "fresh": lambda: None,
    "a Gaussian is left": lambda: (np.random.randn(), random.gauss(0, 1)),
    "a Gaussian was left": lambda: (np.random.randn(2), random.gauss(0, 1), random.gauss(0, 1)),
}


@pytest.fixture(params=["Mersenne Twister", "another kind", "another Python"], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    own = np.random.get_bit_generator()
    np.random.set_bit_generator((np.random.PCG64 if request.param == "another kind" else np.random.MT19937)(3))
    if request.param == "another Python":
        monkeypatch.setattr(twisters, "_PYTHONS_IS_SEEN", False)
        monkeypatch.setattr(twisters, "_NUMPYS_IS_SEEN", False)
    random.seed(3)
    yield
    np.random.set_bit_generator(own)


def next_numbers() -> tuple[float, ...]:
    return random.gauss(0, 1), random.random(), np.random.randn(), np.random.randn(), np.random.random()


@pytest.mark.pairwise
@pytest.mark.parametrize("before", BEFORE)
@pytest.mark.parametrize("draw", DRAWS)
def test_what_is_drawn_is_seen_and_taken_back(before: str, draw: str, kind: None) -> None:
    if draw == "numpy, seeded" and not isinstance(np.random.get_bit_generator(), np.random.MT19937):
        pytest.skip("NumPy seeds a Mersenne Twister only")
    BEFORE[before]()
    others = OtherGenerators()
    assert not others.moved()
    expected = next_numbers()
    assert others.moved()
    others.restore()
    others = OtherGenerators()
    assert not others.moved()
    DRAWS[draw]()
    assert others.moved()
    others.restore()
    assert next_numbers() == expected


def test_the_gaussian_that_is_left_is_put_back_where_the_memory_is_the_same() -> None:
    np.random.randn()
    others = OtherGenerators()
    left = np.random.randn()
    assert not OtherGenerators().moved()  # which notes that none is left
    others.restore()
    later = OtherGenerators()
    assert np.random.randn() == left
    assert later.moved()
