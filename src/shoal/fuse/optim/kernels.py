"""The lowering to torch's fused kernels: one call for members that agree in all numbers, or for each member."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from torch import Tensor

from shoal.fuse.optim.param_state import ParamState, flat
from shoal.fuse.optim.rule import KernelRule, Numbers

__all__ = ["KernelCalls"]


@dataclass(frozen=True)
class _KernelArguments:
    """What a kernel takes for some consecutive members; see `KernelRule.kernel`.

    Args:
        first: index of the first of them.
    """

    first: int
    params: list[Tensor]
    moments: list[list[Tensor]]
    steps: list[Tensor]


class KernelCalls:
    """The calls that update some parameters.

    Args:
        rule: of all members.
        parts: the parameters, whose state has been begun.
    """

    def __init__(self, rule: KernelRule, parts: Sequence[ParamState]) -> None:
        self._rule = rule
        self._parts = parts
        done = list(zip(*(part.steps.tolist() for part in parts if part.steps is not None), strict=True))
        self._alike = [a == b for a, b in pairwise(done)]  # which stays so: all members step together
        self._calls: dict[tuple[int, ...], list[_KernelArguments]] = {}
        self._numbers: Sequence[Numbers] | None = None
        self._lengths: tuple[int, ...] = ()

    def step(self, grads: Sequence[Tensor], numbers: Sequence[Numbers]) -> None:
        """Update the parameters, whose steps have been counted.

        Args:
            grads: of each parameter, [B, *shape].
            numbers: of each member.
        """
        if numbers is not self._numbers:
            self._numbers, self._lengths = numbers, self._divided(numbers)
        lengths = self._lengths
        if lengths not in self._calls:
            self._calls[lengths] = self._divide(lengths)
        grads = [part.ordered(grad) for part, grad in zip(self._parts, grads, strict=True)]
        pieces = [_pieces(grad, lengths) for grad in grads]
        for call, *mine in zip(self._calls[lengths], *pieces, strict=True):
            self._rule.kernel(call.params, mine, call.moments, call.steps, numbers[call.first])

    def _divided(self, numbers: Sequence[Numbers]) -> tuple[int, ...]:
        """How many members each call can update: consecutive ones of equal numbers and as many updates."""
        alike = self._alike or [True] * (len(numbers) - 1)
        starts = [0, *(b for b, same in enumerate(alike, start=1) if not same or numbers[b] != numbers[b - 1])]
        return tuple(end - start for start, end in pairwise([*starts, len(numbers)]))

    def _divide(self, lengths: tuple[int, ...]) -> list[_KernelArguments]:
        params = [_pieces(part.param, lengths) for part in self._parts]
        kinds = zip(*(part.moments for part in self._parts), strict=True)
        moments = [[_pieces(moment, lengths) for moment in kind] for kind in kinds]
        calls = []
        for k, first in enumerate(accumulate(lengths[:-1], initial=0)):
            steps = [part.steps[first] for part in self._parts if part.steps is not None]
            mine = [[moment[k] for moment in kind] for kind in moments]
            calls.append(_KernelArguments(first, [param[k] for param in params], mine, steps))
        return calls


def _pieces(stacked: Tensor, lengths: Sequence[int]) -> Sequence[Tensor]:
    """The rows of each call; all of them as they are, which no view has to be made for."""
    return [stacked] if len(lengths) == 1 else flat(stacked).split_with_sizes(lengths)
