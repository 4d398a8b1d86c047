"""The two lowerings of an update: torch's fused kernels, and multi-tensor functions of stacked tensors."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from shoal.fuse.optim.param_state import ParamState, flat
from shoal.fuse.optim.rule import KernelRule, Numbers, Tensors, UpdateRule

__all__ = ["FunctionCalls", "KernelCalls", "update"]


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
        pieces = [_rows_of_calls(grad, lengths) for grad in grads]
        for call, *mine in zip(self._calls[lengths], *pieces, strict=True):
            self._rule.kernel(call.params, mine, call.moments, call.steps, numbers[call.first])

    def _divided(self, numbers: Sequence[Numbers]) -> tuple[int, ...]:
        """How many members each call can update: consecutive ones of equal numbers and as many updates."""
        alike = self._alike or [True] * (len(numbers) - 1)
        starts = [0, *(b for b, same in enumerate(alike, start=1) if not same or numbers[b] != numbers[b - 1])]
        return tuple(end - start for start, end in pairwise([*starts, len(numbers)]))

    def _divide(self, lengths: tuple[int, ...]) -> list[_KernelArguments]:
        params = [_rows_of_calls(part.param, lengths) for part in self._parts]
        kinds = zip(*(part.moments for part in self._parts), strict=True)
        moments = [[_rows_of_calls(moment, lengths) for moment in kind] for kind in kinds]
        calls = []
        for k, first in enumerate(accumulate(lengths[:-1], initial=0)):
            steps = [part.steps[first] for part in self._parts if part.steps is not None]
            mine = [[moment[k] for moment in kind] for kind in moments]
            calls.append(_KernelArguments(first, [param[k] for param in params], mine, steps))
        return calls


def _rows_of_calls(stacked: Tensor, lengths: Sequence[int]) -> Sequence[Tensor]:
    """The rows of each call; all of them as they are, which no view has to be made for."""
    return [stacked] if len(lengths) == 1 else flat(stacked).split_with_sizes(lengths)


_CACHED = 2**18
"""Elements of a portion on the CPU. A rule walks over them a dozen times, which out of main memory costs several times
as much; many small portions cost calls."""

_Place = tuple[int, slice, slice]
"""A parameter's index, and members and elements of it."""


@dataclass(eq=False)
class _Portion:
    """Parameters, or pieces of some, that are updated together.

    Args:
        places: where they are.
        params: members' elements, [b, n] each.
        moments: for each moment of the rule a list as `params`.
        constants: for each constant of the rule a list as `params`.
    """

    places: list[_Place]
    params: list[Tensor]
    moments: list[list[Tensor]]
    constants: list[Tensors] = field(default_factory=list)

    def spread(self, numbers: Sequence[Sequence[Tensor]]) -> list[Tensors]:
        """Numbers of all members, for each a list over all parameters of [B], for the pieces of this portion."""
        return [
            [_spread(number[i][rows], param) for (i, rows, _), param in zip(self.places, self.params, strict=True)]
            for number in numbers
        ]


class FunctionCalls:
    """The calls that update some parameters of all members.

    Args:
        rule: of all members.
        parts: the parameters, whose state has been begun.
    """

    def __init__(self, rule: UpdateRule, parts: Sequence[ParamState]) -> None:
        self._rule = rule
        self._steps = [part.steps for part in parts if part.steps is not None]
        self._products = [part.product[0] for part in parts if part.product]
        self._device = parts[0].param.device
        self._portions = _divide(parts)
        self._parts = parts
        self._numbers: Sequence[Numbers] = ()
        self._table = torch.empty(0)

    def step(self, grads: Sequence[Tensor], numbers: Sequence[Numbers]) -> None:
        """Update the parameters, whose steps have been counted.

        Args:
            grads: of each parameter, [B, *shape].
            numbers: of each member.
        """
        if numbers != self._numbers:
            self._take(numbers)
        schedule = [number.unbind() for number in self._rule.schedule(self._table, self._steps, self._products)]
        flats = [flat(part.ordered(grad)) for part, grad in zip(self._parts, grads, strict=True)]
        for portion in self._portions:
            mine = [flats[i][rows, elements] for i, rows, elements in portion.places]
            spread = [*portion.constants, *portion.spread(schedule)]
            _apply(self._rule, portion.params, mine, portion.moments, spread)

    def _take(self, numbers: Sequence[Numbers]) -> None:
        self._numbers = list(numbers)
        self._table = torch.tensor(self._numbers, dtype=torch.float64).T.contiguous().to(self._device)
        constants = [[number] * len(self._parts) for number in self._rule.constants(self._table)]
        for portion in self._portions:
            portion.constants = portion.spread(constants)


def update(
    rule: UpdateRule, params: Tensors, grads: Tensors, moments: Sequence[Tensors], numbers: Tensor, constants: int
) -> None:
    """One update by stacked tensors, in place; a pure function of them otherwise, which `make_fx` can trace.

    Args:
        rule: of all members.
        params: P of them, [B, *shape] each.
        grads: as `params`.
        moments: of each parameter: those of the rule.
        numbers: the rule's constants, then for each entry of its schedule one row for each parameter, [R, B].
        constants: how many there are.
    """
    rows, count = list(numbers.unbind()), len(params)
    entries = [[row] * count for row in rows[:constants]]
    entries += [rows[start : start + count] for start in range(constants, len(rows), count)]
    spread = [[_spread(n, p) for n, p in zip(entry, params, strict=True)] for entry in entries]
    _apply(rule, params, grads, list(map(list, zip(*moments, strict=True))), spread)


def _divide(parts: Sequence[ParamState]) -> list[_Portion]:
    limit = _CACHED if parts[0].param.device.type == "cpu" else sys.maxsize
    flats = [(flat(part.param), *map(flat, part.moments)) for part in parts]
    portions: list[_Portion] = []
    size = limit
    for i, rows, elements in _pieces([param.shape for param, *_ in flats], limit):
        param, *moments = (tensor[rows, elements] for tensor in flats[i])
        if not portions or size + param.numel() > limit:
            portions.append(_Portion([], [], [[] for _ in moments]))
            size = 0
        portions[-1].places.append((i, rows, elements))
        portions[-1].params.append(param)
        for kind, moment in zip(portions[-1].moments, moments, strict=True):
            kind.append(moment)
        size += param.numel()
    return portions


def _pieces(shapes: Sequence[tuple[int, ...]], limit: int) -> Iterator[_Place]:
    """Every parameter, [B, n], by as many members at a time as the limit allows, or one, and that one by pieces."""
    for i, (members, count) in enumerate(shapes):
        some = max(1, limit // max(1, count))
        for first in range(0, members, some):
            rows = slice(first, min(first + some, members))
            yield from ((i, rows, slice(start, start + limit)) for start in range(0, count, limit))


def _apply(
    rule: UpdateRule, params: Tensors, grads: Tensors, moments: Sequence[Tensors], numbers: Sequence[Tensors]
) -> None:
    """`UpdateRule.update`, computed in float32 where the tensors are of half precision."""
    if all(param.dtype.itemsize >= 4 for param in params):
        rule.update(params, grads, moments, numbers)
        return
    narrow = (params, *moments)
    wide = [[_widen(tensor) for tensor in tensors] for tensors in narrow]
    rule.update(wide[0], [_widen(grad) for grad in grads], wide[1:], numbers)
    for tensors, copies in zip(narrow, wide, strict=True):
        torch._foreach_copy_(tensors, copies)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _spread(number: Tensor, like: Tensor) -> Tensor:
    """A number of each member, [B], to be broadcast against `like`, [B, *shape], in the type that is computed in."""
    return number.to(torch.promote_types(like.dtype, torch.float32)).view(-1, *[1] * (like.dim() - 1))
