"""Rules for recurrent layers and cells (LSTM, GRU, RNN): all members at once, or in a loop, by measurement.

Layers run one after another, so that each member has its own dropout between them.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
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
from shoal.fuse.rules.linear import batched_linear, transformed
from shoal.fuse.stacked import Stacked, member_count

__all__ = ["RULES", "lstm_sequence", "lstm_step"]

_Gradients = tuple[Tensor | None, ...]


def lstm_sequence(gates: Tensor, h: Tensor, c: Tensor, weight: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """Run all steps of one direction of a layer without projection.

    Autograd would compute and add the gradient of the weights at each step. Here this is one product of all steps, and
    the factors that do not depend on later steps are computed for all steps in one call, as in cuDNN and oneDNN.

    Args:
        gates: Input part of the gates, with both biases, [B, T, N, 4H]; in torch's order i, f, g, o.
        h: h before the first step, [B, N, H]; c has this shape, too.
        weight: Weights of h, [B, 4H, H].

    Returns:
        h of every step, [B, T, N, H], and c after the last step, [B, N, H].
    """
    tensors = (gates, h, c, weight)
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors) and not transformed(gates):
        result: tuple[Tensor, Tensor] = _Sequence.apply(*tensors, reverse)  # type: ignore[no-untyped-call]
        return result
    return _unrolled(*tensors, reverse)


def _unrolled(gates: Tensor, h: Tensor, c: Tensor, weight: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
    """`lstm_sequence` with autograd's own backward pass."""
    outputs = []
    last = c
    for output, last, *_ in _steps(gates, h, c, weight, reverse):  # noqa: B007
        outputs.append(output)
    return _in_time(outputs, reverse), last


def lstm_step(before: Tensor, c: Tensor) -> tuple[Tensor, ...]:
    """c' = f c + i g and h' = o tanh(c'), from gates [..., 4H] before their activations, and c [..., H].

    Returns h', c', (i, f) as one tensor, g, o and tanh(c'). Hochreiter and Schmidhuber (1997), in torch's variant.
    """
    units = c.shape[-1]
    i_f = torch.sigmoid(before[..., : 2 * units])
    g = torch.tanh(before[..., 2 * units : 3 * units])
    o = torch.sigmoid(before[..., 3 * units :])
    i, f = i_f.chunk(2, -1)
    c = torch.addcmul(f * c, i, g)
    tanh_c = torch.tanh(c)
    return o * tanh_c, c, i_f, g, o, tanh_c


def _steps(gates: Tensor, h: Tensor, c: Tensor, weight: Tensor, reverse: bool) -> Iterator[tuple[Tensor, ...]]:
    transposed = weight.transpose(1, 2)
    for part in _ordered(gates.unbind(1), reverse):
        h, c, *others = lstm_step(torch.baddbmm(part, h, transposed), c)
        yield h, c, *others


def _ordered(steps: Iterable[Tensor], reverse: bool) -> list[Tensor]:
    """Steps from time order to the order of computation, or back."""
    found = list(steps)
    return found[::-1] if reverse else found


def _in_time(steps: list[Tensor], reverse: bool) -> Tensor:
    """Stack what was computed at each step, [B, ...] -> [B, T, ...]."""
    return torch.stack(_ordered(steps, reverse), 1)


class _Sequence(torch.autograd.Function):
    """`lstm_sequence` with one product for the gradient of the weights, and few functions at each step backward."""

    @staticmethod
    def forward(ctx: Any, gates: Tensor, h: Tensor, c: Tensor, weight: Tensor, reverse: bool) -> tuple[Tensor, Tensor]:
        columns = zip(*_steps(gates, h, c, weight, reverse), strict=True)
        outputs, cells, i_f, g, o, tanh_c = (list(column) for column in columns)
        ctx.reverse = reverse
        # In the order of computation. The output is not among them, since an in-place function may change it.
        ctx.save_for_backward(
            gates, h, c, weight, *(torch.stack(steps) for steps in ([c, *cells[:-1]], i_f, g, o, tanh_c))
        )
        return _in_time(outputs, reverse), cells[-1]

    @staticmethod
    def backward(ctx: Any, of_output: Tensor, of_c: Tensor) -> _Gradients:
        gates, h, c, weight, *steps = ctx.saved_tensors
        if torch.is_grad_enabled():  # a gradient of this gradient may be taken
            found = _unrolled(gates, h, c, weight, ctx.reverse)
            wanted = [t for t, needed in zip((gates, h, c, weight), ctx.needs_input_grad, strict=False) if needed]
            taken = iter(torch.autograd.grad(found, wanted, (of_output, of_c), create_graph=True))
            return *(next(taken) if needed else None for needed in ctx.needs_input_grad[:4]), None
        of_gates, of_h, of_c = _backward_steps(_ordered(of_output.unbind(1), ctx.reverse), of_c, weight, *steps)
        *_, o, tanh_c = steps
        before = _in_time([h, *(o[:-1] * tanh_c[:-1]).unbind()], ctx.reverse)
        of_all = _in_time(of_gates, ctx.reverse)
        of_weight = torch.bmm(of_all.flatten(1, 2).transpose(1, 2), before.flatten(1, 2))
        return of_all, of_h, of_c, of_weight, None


def _backward_steps(
    of_outputs: list[Tensor], of_c: Tensor, weight: Tensor, c: Tensor, i_f: Tensor, g: Tensor, o: Tensor, tanh_c: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    i, f = i_f.chunk(2, -1)
    of_i_f_g = torch.cat([g * i * (1 - i), c * f * (1 - f), i * (1 - g * g)], -1)
    by_c = torch.unflatten(of_i_f_g, -1, (3, -1)).unbind()
    by_h, to_c, forgotten = (tanh_c * o * (1 - o)).unbind(), (o * (1 - tanh_c * tanh_c)).unbind(), f.unbind()
    of_gates: list[Tensor] = []
    of_h = of_outputs[-1]
    for t in reversed(range(len(of_outputs))):
        of_c = torch.addcmul(of_c, of_h, to_c[t])
        others = torch.mul(by_c[t], of_c.unsqueeze(-2)).flatten(-2)
        of_gates.append(torch.cat([others, of_h * by_h[t]], -1))
        of_c = of_c * forgotten[t]
        of_h = torch.baddbmm(of_outputs[t - 1], of_gates[-1], weight) if t else torch.bmm(of_gates[-1], weight)
    return of_gates[::-1], of_h, of_c


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
        if biased:
            return cls(*flat)
        weights = cls(*flat[:2])
        return replace(weights, projection=flat[2]) if len(flat) > 2 else weights


class _RecurrentCell(NamedTuple):
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
    cell = _CELLS[func.__name__.removesuffix("_cell")]
    states = 2 if func is torch.lstm_cell else 1
    weights = _Weights.of(rest[states:], biased=len(rest) > states + 2)
    return cell.step(_cell_input(cell, x, weights), rest[:states], weights)


def _cell_one_member(func: Callable[..., Any], x: Tensor, *rest: Tensor) -> _Tensors:
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
    """Run the faster lowering; in a trace `batched`, since single members' steps are slow to compile or untraceable."""
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
