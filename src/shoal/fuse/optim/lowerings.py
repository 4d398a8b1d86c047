"""The two lowerings of an optimizer update: torch's fused kernels, and `torch._foreach_*` on stacked tensors."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import attrgetter

import torch
from torch import Tensor

from shoal.fuse.constants import to_device
from shoal.fuse.optim.param_state import ParamState, flatten_rows
from shoal.fuse.optim.rule import Hyperparameters, KernelRule, Tensors, UpdateRule
from shoal.fuse.rows import unsqueeze_like

__all__ = ["ForeachCalls", "KernelCalls", "update", "update_by_kernels"]


@dataclass(frozen=True)
class _KernelArguments:
    """Arguments of one kernel call, for one or several consecutive members; see `KernelRule.kernel`."""

    first: int
    params: list[Tensor]
    moments: list[list[Tensor]]
    steps: list[Tensor]


class KernelCalls:
    """Updates parameters by torch's fused kernels, one call per run of members with equal settings and step counts."""

    def __init__(self, rule: KernelRule, parts: Sequence[ParamState]) -> None:
        self._rule = rule
        self._parts = parts
        counts = [part.steps for part in parts if part.steps is not None]
        done = torch.stack(counts, 1).tolist() if counts else []  # one read of the device for a set of parameters
        self._alike = [a == b for a, b in pairwise(done)]  # until some members step without the others
        self._calls: dict[tuple[int, ...], list[_KernelArguments]] = {}
        self._hyperparameters: Sequence[Hyperparameters] | None = None
        self._lengths: tuple[int, ...] = ()

    def step(self, grads: Sequence[Tensor], hyperparameters: Sequence[Hyperparameters]) -> None:
        """Update the parameters by gradients [B, *shape]; the caller has counted the step already."""
        if hyperparameters is not self._hyperparameters:
            self._hyperparameters, self._lengths = hyperparameters, self._call_lengths(hyperparameters)
        lengths = self._lengths
        if lengths not in self._calls:
            self._calls[lengths] = self._make_calls(lengths)
        grads = [part.in_param_order(grad) for part, grad in zip(self._parts, grads, strict=True)]
        pieces = [_rows_of_calls(grad, lengths) for grad in grads]
        for call, *mine in zip(self._calls[lengths], *pieces, strict=True):
            self._rule.kernel(call.params, mine, call.moments, call.steps, hyperparameters[call.first])

    def _call_lengths(self, hyperparameters: Sequence[Hyperparameters]) -> tuple[int, ...]:
        """Number of members per call: consecutive members with equal hyper-parameters and equal step counts."""
        alike = self._alike or [True] * (len(hyperparameters) - 1)
        starts = [
            0,
            *(b for b, same in enumerate(alike, start=1) if not same or hyperparameters[b] != hyperparameters[b - 1]),
        ]
        return tuple(end - start for start, end in pairwise([*starts, len(hyperparameters)]))

    def _make_calls(self, lengths: tuple[int, ...]) -> list[_KernelArguments]:
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
    """The rows of each call; for a single call the tensor itself, since a view takes time."""
    return [stacked] if len(lengths) == 1 else flatten_rows(stacked).split_with_sizes(lengths)


_CHUNK_ELEMENTS = 2**18
"""Number of elements of a chunk on the CPU. A rule reads them about a dozen times, which takes several times as long
from main memory as from cache. Smaller chunks need more calls."""

_Place = tuple[int, slice, slice]
"""Index of a parameter, slice of its members, slice of their elements."""


@dataclass(eq=False)
class _Chunk:
    places: list[_Place]
    params: list[Tensor]
    moments: list[list[Tensor]]
    constants: list[Tensors] = field(default_factory=list)

    def broadcast(self, coefficients: Sequence[Sequence[Tensor]]) -> list[Tensors]:
        """Select and broadcast the coefficients of this chunk; each one is a list over all parameters, [B] each."""
        return [
            [
                _broadcast(coefficient[i][rows], param)
                for (i, rows, _), param in zip(self.places, self.params, strict=True)
            ]
            for coefficient in coefficients
        ]


class ForeachCalls:
    """Updates parameters by `torch._foreach_*` functions, in chunks that fit the processor's cache."""

    def __init__(self, rule: UpdateRule, parts: Sequence[ParamState]) -> None:
        self._rule = rule
        self._steps = [part.steps for part in parts if part.steps is not None]
        self._products = [part.product[0] for part in parts if part.product]
        self._device = parts[0].param.device
        self._dtype = max((_wide(part.param.dtype) for part in parts), key=attrgetter("itemsize"))
        self._chunks = _make_chunks(parts)
        self._parts = parts
        self._hyperparameters: Sequence[Hyperparameters] = ()
        self._table = torch.empty(0)

    def step(self, grads: Sequence[Tensor], hyperparameters: Sequence[Hyperparameters]) -> None:
        """Update the parameters by gradients [B, *shape]; the caller has counted the step already."""
        if hyperparameters != self._hyperparameters:
            self._set_hyperparameters(hyperparameters)
        numbers = self._rule.step_coefficients(self._table, self._steps, self._products)
        step_coefficients = [number.to(self._dtype).unbind() for number in numbers]
        flats = [flatten_rows(part.in_param_order(grad)) for part, grad in zip(self._parts, grads, strict=True)]
        for chunk in self._chunks:
            mine = [flats[i][rows, elements] for i, rows, elements in chunk.places]
            spread = [*chunk.constants, *chunk.broadcast(step_coefficients)]
            _apply(self._rule, chunk.params, mine, chunk.moments, spread)

    def _set_hyperparameters(self, hyperparameters: Sequence[Hyperparameters]) -> None:
        self._hyperparameters = list(hyperparameters)
        self._table = to_device(torch.tensor(self._hyperparameters, dtype=torch.float64).T.contiguous(), self._device)
        constants = [[number] * len(self._parts) for number in self._rule.constants(self._table)]
        for chunk in self._chunks:
            chunk.constants = chunk.broadcast(constants)


def update(
    rule: UpdateRule, params: Tensors, grads: Tensors, moments: Sequence[Tensors], coefficients: Tensor, constants: int
) -> None:
    """Update parameters [B, *shape] in place without other side effects, so that `make_fx` can trace the update.

    Args:
        coefficients: The rule's constants, then for each of its step coefficients one row per parameter, [R, B].
    """
    rows, count = list(coefficients.unbind()), len(params)
    entries = [[row] * count for row in rows[:constants]]
    entries += [rows[start : start + count] for start in range(constants, len(rows), count)]
    spread = [[_broadcast(n, p) for n, p in zip(entry, params, strict=True)] for entry in entries]
    _apply(rule, params, grads, list(map(list, zip(*moments, strict=True))), spread)


def update_by_kernels(
    rule: KernelRule,
    parts: Sequence[ParamState],
    params: Tensors,
    grads: Tensors,
    moments: Sequence[Tensors],
    rows: Tensor,
    hyperparameters: Sequence[Hyperparameters],
) -> None:
    """As `update`, by a call of torch's fused kernel for each member, whose learning rates and counts are tensors.

    The other hyper-parameters are numbers, which a CUDA graph would freeze.

    Args:
        rows: The learning rates, then the step counts of each parameter, including this one: float32 [1 + P, B].
    """
    ordered = [part.in_param_order(grad) for part, grad in zip(parts, grads, strict=True)]
    kinds = zip(*moments, strict=True)
    flats = [[flatten_rows(tensor).unbind() for tensor in kind] for kind in (params, ordered, *kinds)]
    for b, numbers in enumerate(hyperparameters):
        own_params, own_grads, *own_moments = ([tensor[b] for tensor in kind] for kind in flats)
        rate, *steps = rows[:, b].unbind()
        rule.kernel(own_params, own_grads, own_moments, steps, (rate, *numbers[1:]))


def _make_chunks(parts: Sequence[ParamState]) -> list[_Chunk]:
    limit = _CHUNK_ELEMENTS if parts[0].param.device.type == "cpu" else sys.maxsize
    flats = [(flatten_rows(part.param), *map(flatten_rows, part.moments)) for part in parts]
    chunks: list[_Chunk] = []
    size = limit
    for i, rows, elements in _pieces([param.shape for param, *_ in flats], limit):
        param, *moments = (tensor[rows, elements] for tensor in flats[i])
        if not chunks or size + param.numel() > limit:
            chunks.append(_Chunk([], [], [[] for _ in moments]))
            size = 0
        chunks[-1].places.append((i, rows, elements))
        chunks[-1].params.append(param)
        for kind, moment in zip(chunks[-1].moments, moments, strict=True):
            kind.append(moment)
        size += param.numel()
    return chunks


def _pieces(shapes: Sequence[tuple[int, ...]], limit: int) -> Iterator[_Place]:
    for i, (members, count) in enumerate(shapes):
        some = max(1, limit // max(1, count))
        for first in range(0, members, some):
            rows = slice(first, min(first + some, members))
            yield from ((i, rows, slice(start, start + limit)) for start in range(0, count, limit))


def _apply(
    rule: UpdateRule, params: Tensors, grads: Tensors, moments: Sequence[Tensors], coefficients: Sequence[Tensors]
) -> None:
    """Call `UpdateRule.update`, in float32 if a parameter has half precision."""
    if all(param.dtype.itemsize >= 4 for param in params):
        rule.update(params, grads, moments, coefficients)
        return
    narrow = (params, *moments)
    wide = [[_widen(tensor) for tensor in tensors] for tensors in narrow]
    rule.update(wide[0], [_widen(grad) for grad in grads], wide[1:], coefficients)
    for tensors, copies in zip(narrow, wide, strict=True):
        torch._foreach_copy_(tensors, copies)


def _widen(tensor: Tensor) -> Tensor:
    return tensor.to(_wide(tensor.dtype))


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a parameter's update is computed."""
    return torch.promote_types(dtype, torch.float32)


def _broadcast(number: Tensor, like: Tensor) -> Tensor:
    """One number per member, [B], shaped to broadcast against `like`, [B, *shape], in the dtype of computation."""
    return unsqueeze_like(number.to(_wide(like.dtype)), like)
