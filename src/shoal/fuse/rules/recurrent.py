"""Rules for recurrent layers and cells (LSTM, GRU, RNN): all members at once, or in a loop, by measurement.

For one member, torch has a fused kernel on some devices and for some dtypes (oneDNN's LSTM, cuDNN), and runs step by
step otherwise. Here layers run one after another, so that each member has its own dropout between them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from shoal.fuse.autotune import fastest
from shoal.fuse.patches import HiddenWarning
from shoal.fuse.rules.base import Rule, stacked_data
from shoal.fuse.rules.dropout import apply_dropout
from shoal.fuse.rules.linear import batched_linear
from shoal.fuse.rules.lstm_sequence import lstm_sequence, lstm_step
from shoal.fuse.stacked import Stacked, member_count

__all__ = ["RULES"]

_State = tuple[Tensor, ...]
"""The state (h,), or (h, c) of an LSTM, with shapes [B, N, R] and [B, N, H]."""


@dataclass(frozen=True)
class _Weights:
    """All members' weights of a cell, or of one direction of one layer, with G gates of H units."""

    input: Tensor
    hidden: Tensor
    input_bias: Tensor | None = None
    hidden_bias: Tensor | None = None
    projection: Tensor | None = None

    @classmethod
    def of(cls, flat: tuple[Tensor, ...], biased: bool) -> "_Weights":
        """Make weights from tensors in the order of torch's functions."""
        if biased:
            return cls(*flat)
        weights = cls(*flat[:2])
        return replace(weights, projection=flat[2]) if len(flat) > 2 else weights


class _RecurrentCell(NamedTuple):
    """One kind of recurrent cell."""

    step: Callable[[Tensor, _State, _Weights], _State]
    sums_biases: bool
    sequence: Callable[..., tuple[Tensor, Tensor]] | None = None


def _unroll(
    cell: _RecurrentCell, x: Tensor, state: _State, weights: _Weights, time: int, reverse: bool
) -> tuple[Tensor, _State]:
    """Run one direction of a layer, step by step, for all members at once."""
    if time == 2:
        x = x.transpose(1, 2)
    gates = torch.unflatten(_cell_input(cell, x.flatten(1, 2), weights), 1, x.shape[1:3])
    if cell.sequence is not None and weights.projection is None:
        output, c = cell.sequence(gates, *state, weights.hidden, reverse)
        state = output.select(1, 0 if reverse else -1), c
        return output.transpose(1, 2) if time == 2 else output, state
    steps = list(gates.unbind(1))
    if reverse:
        steps.reverse()
    outputs = []
    for part in steps:
        state = cell.step(part, state, weights)
        outputs.append(state[0])
    if reverse:
        outputs.reverse()
    return torch.stack(outputs, time), state


def _cell_input(cell: _RecurrentCell, x: Tensor, weights: _Weights) -> Tensor:
    """The input part of the gates: [B, N, I] -> [B, N, G*H]."""
    bias = weights.input_bias
    if bias is not None and weights.hidden_bias is not None and cell.sums_biases:
        # Times one, so that the two have gradients of their own memory, which clipping in place would else scale twice.
        bias = bias + weights.hidden_bias * 1
    return batched_linear(x, weights.input, bias)


def _lstm(gates: Tensor, state: _State, weights: _Weights) -> _State:
    """As `lstm_step`. With a projection, h' = W_hr (o tanh(c')); Sak et al. (2014)."""
    h, c, *_ = lstm_step(torch.baddbmm(gates, state[0], weights.hidden.transpose(1, 2)), state[1])
    if weights.projection is not None:
        h = torch.bmm(h, weights.projection.transpose(1, 2))
    return h, c


def _gru(gates: Tensor, state: _State, weights: _Weights) -> _State:
    """h' = (1 - z) n + z h with n = tanh(W_in x + b_in + r (W_hn h + b_hn)); Cho et al. (2014), torch's variant."""
    (h,) = state
    units = h.shape[-1]
    of_input, new_of_input = torch.split(gates, [2 * units, units], -1)
    of_hidden, new_of_hidden = torch.split(
        batched_linear(h, weights.hidden, weights.hidden_bias), [2 * units, units], -1
    )
    r, z = torch.sigmoid(of_input + of_hidden).chunk(2, -1)
    n = torch.tanh(torch.addcmul(new_of_input, r, new_of_hidden))
    return (torch.addcmul(n, z, h - n),)


def _elman(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, _State, _Weights], _State]:
    """h' = activation(W_ih x + b_ih + W_hh h + b_hh); Elman (1990)."""

    def step(gates: Tensor, state: _State, weights: _Weights) -> _State:
        return (activation(torch.baddbmm(gates, state[0], weights.hidden.transpose(1, 2))),)

    return step


_CELLS = {
    "lstm": _RecurrentCell(_lstm, sums_biases=True, sequence=lstm_sequence),
    "gru": _RecurrentCell(_gru, sums_biases=False),
    "rnn_tanh": _RecurrentCell(_elman(torch.tanh), sums_biases=True),
    "rnn_relu": _RecurrentCell(_elman(torch.relu), sums_biases=True),
}
"""Name of the torch function -> its cell."""


_Tensors = tuple[Tensor, ...]

_memory_warning = HiddenWarning("RNN module weights are not part of single")
"""A warning about weights that are not contiguous in memory; here the weights are rows of the stacked weights."""


@dataclass(frozen=True)
class _Layer:
    """One recurrent layer, in one direction or in both (D = 2).

    Its lowerings take x, [B, T, N, I] or [B, N, T, I], the states, each [B, D, N, H], and the weights, each [B, ...],
    in torch's order. They return the outputs, shaped as x except for the last axis D*H, and the states after the last
    step."""

    func: Callable[..., Any]
    biased: bool
    training: bool
    bidirectional: bool
    batch_first: bool

    @property
    def num_states(self) -> int:
        """Number of states: h, and for an LSTM c."""
        return 2 if self.func is torch.lstm else 1

    def batched(self, x: Tensor, *rest: Tensor) -> _Tensors:
        """Run all members at once."""
        states, weights = rest[: self.num_states], rest[self.num_states :]
        directions = 2 if self.bidirectional else 1
        each = len(weights) // directions
        outputs, finals = [], []
        for d in range(directions):
            own = _Weights.of(weights[d * each : (d + 1) * each], self.biased)
            before = tuple(state[:, d] for state in states)
            time = 2 if self.batch_first else 1
            output, after = _unroll(_CELLS[self.func.__name__], x, before, own, time, reverse=d == 1)
            outputs.append(output)
            finals.append(after)
        output = torch.cat(outputs, -1) if self.bidirectional else outputs[0]
        dtype = self.dtype(x)
        return (output.to(dtype), *(torch.stack(after, 1).to(dtype) for after in zip(*finals, strict=True)))

    def dtype(self, x: Tensor) -> torch.dtype | None:
        """Type of the results if autocast casts all inputs of torch's function, else None."""
        device = x.device.type
        casts = torch.is_autocast_enabled(device) and (self.func is torch.lstm or device != "cpu")
        return torch.get_autocast_dtype(device) if casts and x.dtype != torch.float64 else None

    def loop(self, *tensors: Tensor) -> _Tensors:
        """Run one member after another."""
        with _memory_warning():
            return _each_member(self.one_member, *tensors)

    def folded(self, x: Tensor, *rest: Tensor) -> _Tensors:
        """Run one batch of B*N with weights that all members share, in torch's shapes without B."""
        members = len(x)
        states, weights = rest[: self.num_states], rest[self.num_states :]
        sequences = x.flatten(0, 1) if self.batch_first else x.transpose(0, 1).flatten(1, 2)
        output, *after = self.one_member(
            sequences, *(state.transpose(0, 1).flatten(1, 2) for state in states), *weights
        )
        unfolded = [torch.unflatten(state, 1, (members, -1)).transpose(0, 1) for state in after]
        if self.batch_first:
            return (torch.unflatten(output, 0, (members, -1)), *unfolded)
        return (torch.unflatten(output, 1, (members, -1)).transpose(0, 1), *unfolded)

    def one_member(self, x: Tensor, *rest: Tensor) -> _Tensors:
        """Run torch's function for one member."""
        states, weights = rest[: self.num_states], rest[self.num_states :]
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
    if not isinstance(has_biases, bool):  # a packed sequence: (data, batch sizes, hx, params, ...)
        return NotImplemented
    if input.dim() != 3:
        return NotImplemented
    members = member_count((input, hx, params, dropout)) or 1
    layer = _Layer(func, has_biases, train, bidirectional, batch_first)
    states = [stacked_data(state, members) for state in (hx if func is torch.lstm else (hx,))]
    dropped = train and (isinstance(dropout, Stacked) or dropout > 0)
    directions = 2 if bidirectional else 1
    each = len(params) // num_layers
    x = stacked_data(input, members)
    finals = []
    for number in range(num_layers):
        before = [state.narrow(1, number * directions, directions) for state in states]
        x, *after = _run_layer(layer, x, before, params[number * each : (number + 1) * each])
        finals.append(after)
        if dropped and number < num_layers - 1:
            x = apply_dropout(x, dropout, tuple(x.shape[1:]))
    return (Stacked(x), *(Stacked(torch.cat(after, 1)) for after in zip(*finals, strict=True)))


def _run_layer(layer: _Layer, x: Tensor, states: Sequence[Tensor], weights: Sequence[Any]) -> _Tensors:
    if not any(isinstance(weight, Stacked) for weight in weights):
        return layer.folded(x, *states, *weights)
    settings = (layer.biased, layer.training, layer.bidirectional, layer.batch_first)
    tensors = (x, *states, *(stacked_data(weight, len(x)) for weight in weights))
    return _faster(layer.func.__name__, layer.batched, layer.loop, tensors, settings)


def _cell(func: Any, input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    states = tuple(hx) if func is torch.lstm_cell else (hx,)
    weights = (w_ih, w_hh) if b_ih is None else (w_ih, w_hh, b_ih, b_hh)
    if any(state.dim() != 2 for state in (input, *states)) or (b_ih is None) != (b_hh is None):
        return NotImplemented
    members = member_count((input, states, weights)) or 1
    x, *before = (stacked_data(value, members) for value in (input, *states))
    if not any(isinstance(weight, Stacked) for weight in weights):
        after = _cell_one_member(func, *(value.flatten(0, 1) for value in (x, *before)), *weights)
        after = tuple(torch.unflatten(state, 0, (members, -1)) for state in after)
    else:
        tensors = (x, *before, *(stacked_data(weight, members) for weight in weights))
        loop = partial(_each_member, partial(_cell_one_member, func))
        after = _faster(func.__name__, partial(_cell_batched, func), loop, tensors)
    result = tuple(map(Stacked, after))
    return result if func is torch.lstm_cell else result[0]


def _cell_batched(func: Callable[..., Any], x: Tensor, *rest: Tensor) -> _Tensors:
    """One step of all members: x [B, N, I], states [B, N, H] and weights [B, ...] -> states."""
    cell = _CELLS[func.__name__.removesuffix("_cell")]
    states = 2 if func is torch.lstm_cell else 1
    weights = _Weights.of(rest[states:], biased=len(rest) > states + 2)
    return cell.step(_cell_input(cell, x, weights), rest[:states], weights)


def _cell_one_member(func: Callable[..., Any], x: Tensor, *rest: Tensor) -> _Tensors:
    """Run torch's step for one member."""
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
    """Run the faster lowering; in a trace always `batched`.

    A trace of the steps of every single member is a graph that takes minutes to compile, and oneDNN's LSTM cannot be
    traced at all. A compiled step of all members has few kernels.
    """
    if _get_current_dispatch_mode() is not None:
        return batched(*tensors)
    return fastest(name, {"batched": batched, "loop": loop}, tensors, settings)


def _each_member(one_member: Callable[..., _Tensors], *tensors: Tensor) -> _Tensors:
    # cuDNN refuses states and weights that are not contiguous.
    results = [one_member(*own) for own in zip(*(tensor.contiguous().unbind(0) for tensor in tensors), strict=True)]
    return tuple(torch.stack(column) for column in zip(*results, strict=True))


RULES = (
    Rule(
        (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
        {"batched": _Layer.batched, "loop": _Layer.loop},
        run=_layers,
    ),
    Rule(
        (torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell),
        {"batched": _cell_batched, "loop": _cell_one_member},
        run=_cell,
    ),
)
