"""One direction of one recurrent layer, step by step, for all members at once."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["CELLS", "RecurrentCell", "State", "Weights", "cell_input", "unroll"]

State = tuple[Tensor, ...]
"""(h,), or (h, c) of an LSTM: [B, N, R] and [B, N, H]."""


@dataclass(frozen=True)
class Weights:
    """All members' weights of G gates of H units, of one direction of one layer or of a cell.

    Args:
        input: [B, G*H, I].
        hidden: [B, G*H, R].
        input_bias: [B, G*H].
        hidden_bias: [B, G*H].
        projection: of an LSTM's output h, [B, R, H]; without it R = H.
    """

    input: Tensor
    hidden: Tensor
    input_bias: Tensor | None = None
    hidden_bias: Tensor | None = None
    projection: Tensor | None = None

    @classmethod
    def of(cls, flat: tuple[Tensor, ...], biased: bool) -> "Weights":
        """Weights in the order in which torch's functions take them."""
        if biased:
            return cls(*flat)
        weights = cls(*flat[:2])
        return replace(weights, projection=flat[2]) if len(flat) > 2 else weights


class RecurrentCell(NamedTuple):
    """How a recurrent layer takes a step.

    Args:
        step: the gates' part that comes of the input, [B, N, G*H], the state before, the weights -> the state after.
        sums_biases: both biases are added to the same sum, so both may go in with the input.
    """

    step: Callable[[Tensor, State, Weights], State]
    sums_biases: bool


def unroll(
    cell: RecurrentCell, x: Tensor, state: State, weights: Weights, time: int, reverse: bool
) -> tuple[Tensor, State]:
    """Run a layer in one direction.

    Args:
        cell: its kind.
        x: [B, T, N, I], or [B, N, T, I].
        state: before the first step.
        weights: of all members.
        time: the axis of T, 1 or 2.
        reverse: from the last step to the first.

    Returns:
        h of every step, like `x` but for its last axis, R; and the state after the last step.
    """
    steps = list(torch.unflatten(cell_input(cell, x.flatten(1, 2), weights), 1, x.shape[1:3]).unbind(time))
    if reverse:
        steps.reverse()
    outputs = []
    for gates in steps:
        state = cell.step(gates, state, weights)
        outputs.append(state[0])
    if reverse:
        outputs.reverse()
    return torch.stack(outputs, time), state


def cell_input(cell: RecurrentCell, x: Tensor, weights: Weights) -> Tensor:
    """The part of the gates that comes of the input: [B, N, I] -> [B, N, G*H]."""
    bias = weights.input_bias
    if bias is not None and weights.hidden_bias is not None and cell.sums_biases:
        bias = bias + weights.hidden_bias
    return _affine(x, weights.input, bias)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    turned = weight.transpose(1, 2)
    return torch.bmm(x, turned) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, turned)


def _lstm(gates: Tensor, state: State, weights: Weights) -> State:
    """c' = f c + i g and h' = o tanh(c'); Hochreiter and Schmidhuber (1997), as torch has it.

    With a projection, h' = W_hr (o tanh(c')); Sak et al. (2014).
    """
    h, c = state
    i, f, g, o = torch.baddbmm(gates, h, weights.hidden.transpose(1, 2)).chunk(4, -1)
    c = torch.addcmul(torch.sigmoid(f) * c, torch.sigmoid(i), torch.tanh(g))
    h = torch.sigmoid(o) * torch.tanh(c)
    if weights.projection is not None:
        h = torch.bmm(h, weights.projection.transpose(1, 2))
    return h, c


def _gru(gates: Tensor, state: State, weights: Weights) -> State:
    """h' = (1 - z) n + z h with n = tanh(W_in x + b_in + r (W_hn h + b_hn)); Cho et al. (2014), as torch has it."""
    (h,) = state
    units = h.shape[-1]
    of_input, new_of_input = torch.split(gates, [2 * units, units], -1)
    of_hidden, new_of_hidden = torch.split(_affine(h, weights.hidden, weights.hidden_bias), [2 * units, units], -1)
    r, z = torch.sigmoid(of_input + of_hidden).chunk(2, -1)
    n = torch.tanh(torch.addcmul(new_of_input, r, new_of_hidden))
    return (torch.addcmul(n, z, h - n),)


def _elman(activation: Callable[[Tensor], Tensor]) -> Callable[[Tensor, State, Weights], State]:
    """h' = activation(W_ih x + b_ih + W_hh h + b_hh); Elman (1990)."""

    def step(gates: Tensor, state: State, weights: Weights) -> State:
        return (activation(torch.baddbmm(gates, state[0], weights.hidden.transpose(1, 2))),)

    return step


CELLS = {
    "lstm": RecurrentCell(_lstm, sums_biases=True),
    "gru": RecurrentCell(_gru, sums_biases=False),
    "rnn_tanh": RecurrentCell(_elman(torch.tanh), sums_biases=True),
    "rnn_relu": RecurrentCell(_elman(torch.relu), sums_biases=True),
}
"""By the names of torch's functions."""
