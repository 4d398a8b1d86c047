"""The lowering to multi-tensor functions of stacked tensors, in portions that a processor's cache can hold."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shoal.fuse.optim.param_state import ParamState, flat
from shoal.fuse.optim.rule import Numbers, Tensors, UpdateRule

__all__ = ["FunctionCalls", "update"]

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
