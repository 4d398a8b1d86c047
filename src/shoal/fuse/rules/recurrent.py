"""Recurrent layers and cells: all members' steps at once, or one member after another, whichever is faster here.

Torch's own function of one member has a fused kernel on some devices and for some types (oneDNN's LSTM, cuDNN), and
takes its steps one by one elsewhere. Layers run one after another, so that dropout between them is each member's own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from shoal.fuse.autotune import fastest
from shoal.fuse.patches import HiddenWarning
from shoal.fuse.rules.base import Rule
from shoal.fuse.rules.dropout import drop
from shoal.fuse.rules.unroll import CELLS, Weights, cell_input, unroll
from shoal.fuse.stacked import Stacked, count

__all__ = ["RULES"]

_Tensors = tuple[Tensor, ...]

_scattered = HiddenWarning("RNN module weights are not part of single")
"""They are rows of the array's."""


@dataclass(frozen=True)
class _Layer:
    """One recurrent layer, in one direction or in both (D = 2).

    Its ways take x, [B, T, N, I] or [B, N, T, I], the states, each [B, D, N, H], and the weights, each [B, ...] and in
    torch's order. They return the outputs, like x but [..., D*H], and the states after the last step.

    Args:
        func: torch's, of one member.
        biased: the weights hold biases.
        training: the member's mode, which decides what torch keeps for the backward pass.
        bidirectional: D = 2.
        batch_first: N comes before T.
    """

    func: Callable[..., Any]
    biased: bool
    training: bool
    bidirectional: bool
    batch_first: bool

    @property
    def states(self) -> int:
        """How many there are: h, and the c of an LSTM."""
        return 2 if self.func is torch.lstm else 1

    def batched(self, x: Tensor, *rest: Tensor) -> _Tensors:
        """All members' steps at once."""
        states, weights = rest[: self.states], rest[self.states :]
        directions = 2 if self.bidirectional else 1
        each = len(weights) // directions
        outputs, finals = [], []
        for d in range(directions):
            own = Weights.of(weights[d * each : (d + 1) * each], self.biased)
            before = tuple(state[:, d] for state in states)
            time = 2 if self.batch_first else 1
            output, after = unroll(CELLS[self.func.__name__], x, before, own, time, reverse=d == 1)
            outputs.append(output)
            finals.append(after)
        output = torch.cat(outputs, -1) if self.bidirectional else outputs[0]
        dtype = self.dtype(x)
        return (output.to(dtype), *(torch.stack(after, 1).to(dtype) for after in zip(*finals, strict=True)))

    def dtype(self, x: Tensor) -> torch.dtype | None:
        """Of the results, where autocast casts all that goes into torch's function; None where it casts parts of it."""
        device = x.device.type
        casts = torch.is_autocast_enabled(device) and (self.func is torch.lstm or device != "cpu")
        return torch.get_autocast_dtype(device) if casts and x.dtype != torch.float64 else None

    def loop(self, *tensors: Tensor) -> _Tensors:
        """One member after another."""
        with _scattered():
            return _each_member(self.alone, *tensors)

    def folded(self, x: Tensor, *rest: Tensor) -> _Tensors:
        """As one batch of B*N, where all members share the weights; these are as torch takes them, without B."""
        members = len(x)
        states, weights = rest[: self.states], rest[self.states :]
        sequences = x.flatten(0, 1) if self.batch_first else x.transpose(0, 1).flatten(1, 2)
        output, *after = self.alone(sequences, *(state.transpose(0, 1).flatten(1, 2) for state in states), *weights)
        unfolded = [torch.unflatten(state, 1, (members, -1)).transpose(0, 1) for state in after]
        if self.batch_first:
            return (torch.unflatten(output, 0, (members, -1)), *unfolded)
        return (torch.unflatten(output, 1, (members, -1)).transpose(0, 1), *unfolded)

    def alone(self, x: Tensor, *rest: Tensor) -> _Tensors:
        """Torch's own, of one member."""
        states, weights = rest[: self.states], rest[self.states :]
        hx = states if self.func is torch.lstm else states[0]
        modes = (self.training, self.bidirectional, self.batch_first)
        result: _Tensors = self.func(x, hx, weights, self.biased, 1, 0.0, *modes)
        return result


def _layers(
    func: Any,
    input: Any,
    hx: Any,
    params: Any,
    has_biases: Any,
    num_layers: int,
    dropout: Any,
    train: bool,
    bidirectional: bool,
    batch_first: bool = False,
) -> Any:
    if not isinstance(has_biases, bool):  # (data, batch sizes, hx, params, ...)
        return NotImplemented
    if input.dim() != 3:
        return NotImplemented
    members = count((input, hx, params, dropout)) or 1
    layer = _Layer(func, has_biases, train, bidirectional, batch_first)
    states = [_whole(state, members) for state in (hx if func is torch.lstm else (hx,))]
    dropped = train and (isinstance(dropout, Stacked) or dropout > 0)
    directions = 2 if bidirectional else 1
    each = len(params) // num_layers
    x = _whole(input, members)
    finals = []
    for number in range(num_layers):
        before = [state.narrow(1, number * directions, directions) for state in states]
        x, *after = _run_layer(layer, x, before, params[number * each : (number + 1) * each])
        finals.append(after)
        if dropped and number < num_layers - 1:
            x = drop(x, dropout, tuple(x.shape[1:]))
    return (Stacked(x), *(Stacked(torch.cat(after, 1)) for after in zip(*finals, strict=True)))


def _run_layer(layer: _Layer, x: Tensor, states: Sequence[Tensor], weights: Sequence[Any]) -> _Tensors:
    if not any(isinstance(weight, Stacked) for weight in weights):
        return layer.folded(x, *states, *weights)
    settings = (layer.biased, layer.training, layer.bidirectional, layer.batch_first)
    tensors = (x, *states, *(_whole(weight, len(x)) for weight in weights))
    return _faster(layer.func.__name__, layer.batched, layer.loop, tensors, settings)


def _cell(func: Any, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    states = tuple(hx) if func is torch.lstm_cell else (hx,)
    weights = (w_ih, w_hh) if b_ih is None else (w_ih, w_hh, b_ih, b_hh)
    if any(state.dim() != 2 for state in (input, *states)) or (b_ih is None) != (b_hh is None):
        return NotImplemented
    members = count((input, states, weights)) or 1
    x, *before = (_whole(value, members) for value in (input, *states))
    if not any(isinstance(weight, Stacked) for weight in weights):
        after = _cell_alone(func, *(value.flatten(0, 1) for value in (x, *before)), *weights)
        after = tuple(torch.unflatten(state, 0, (members, -1)) for state in after)
    else:
        tensors = (x, *before, *(_whole(weight, members) for weight in weights))
        loop = partial(_each_member, partial(_cell_alone, func))
        after = _faster(func.__name__, partial(_cell_batched, func), loop, tensors)
    result = tuple(map(Stacked, after))
    return result if func is torch.lstm_cell else result[0]


def _cell_batched(func: Callable[..., Any], x: Tensor, *rest: Tensor) -> _Tensors:
    """All members' step: x [B, N, I], states [B, N, H] and weights [B, ...] -> states."""
    cell = CELLS[func.__name__.removesuffix("_cell")]
    states = 2 if func is torch.lstm_cell else 1
    weights = Weights.of(rest[states:], biased=len(rest) > states + 2)
    return cell.step(cell_input(cell, x, weights), rest[:states], weights)


def _cell_alone(func: Callable[..., Any], x: Tensor, *rest: Tensor) -> _Tensors:
    """Torch's own step of one member."""
    if func is not torch.lstm_cell:
        return (func(x, *rest),)
    h, c, *weights = rest
    result: _Tensors = func(x, (h, c), *weights)
    return result


def _faster(
    name: str,
    batched: Callable[..., _Tensors],
    loop: Callable[..., _Tensors],
    tensors: _Tensors,
    settings: tuple[bool, ...] = (),
) -> _Tensors:
    """The faster way; in a trace always all members at once.

    There the steps of each member by itself make a graph that takes minutes to compile, and oneDNN's LSTM cannot be
    traced at all, while one compiled step of all members has few kernels.
    """
    if _get_current_dispatch_mode() is not None:
        return batched(*tensors)
    return fastest(name, {"batched": batched, "loop": loop}, tensors, settings)


def _each_member(alone: Callable[..., _Tensors], *tensors: Tensor) -> _Tensors:
    results = [alone(*own) for own in zip(*(tensor.unbind(0) for tensor in tensors), strict=True)]
    return tuple(torch.stack(column) for column in zip(*results, strict=True))


def _whole(value: Any, members: int) -> Tensor:
    """All members' data, [B, ...]; a shared value is repeated, as a view."""
    data: Tensor = value.whole if isinstance(value, Stacked) else value.expand(members, *value.shape)
    return data


RULES = (
    Rule(
        (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
        {"batched": _Layer.batched, "loop": _Layer.loop},
        run=_layers,
    ),
    Rule(
        (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell),
        {"batched": _cell_batched, "loop": _cell_alone},
        run=_cell,
    ),
)
