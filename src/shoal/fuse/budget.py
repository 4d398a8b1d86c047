"""How much time the autotuner may take, so that shapes that are new for ever are not measured for ever."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["Budget"]

_ALLOWANCE_SECONDS = 20.0
_SHARE = 0.05


@dataclass
class Budget:
    """Time for races: an allowance, enough for all layers of a large model, then a share of the time that passes.

    It bounds what measuring costs whatever the shapes do. A number of races does not: what is few for a short run on
    sentences is too few for a model of many different layers.

    Args:
        clock: in seconds.
    """

    clock: Callable[[], float] = time.perf_counter
    _began: float | None = field(default=None, init=False)
    _spent: float = field(default=0.0, init=False)

    def left(self) -> bool:
        """Whether there may be another race; time passes from the first time that this is asked."""
        if self._began is None:
            self._began = self.clock()
        return self._spent < _ALLOWANCE_SECONDS + _SHARE * (self.clock() - self._began)

    @contextmanager
    def charged(self) -> Iterator[None]:
        """What runs within is a race."""
        start = self.clock()
        try:
            yield
        finally:
            self._spent += self.clock() - start
