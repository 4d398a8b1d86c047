"""What training steps leave where all threads of the process see it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from shoal.fuse.randomness import Drawn, OtherGenerators
from shoal.fuse.reached import Reached

__all__ = ["SharedState"]


class SharedState:
    """Default generators, and what user code keeps outside of models, as they are when this is made.

    Args:
        fn: the task's own function; what it closes over, the globals that it names and the attributes of its object are
            looked at, and what lies in these.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._others = OtherGenerators()
        self._drawn = Drawn(torch.device("cpu"))
        self._reached = Reached(fn, nn.Module(), ())

    def changed(self) -> bool:
        """Whether anything was drawn or put there since."""
        return self._others.moved() or self._drawn() or self._reached.changed()
