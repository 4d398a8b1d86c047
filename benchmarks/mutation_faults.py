"""Small faults for `mutations.py`: each changes one function of Shoal that only arrays use."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.fuse import array_state, capture, plain_step, randomness, slots, step
from shoal.fuse.array import ModelArray
from shoal.fuse.array_state import ArrayState
from shoal.fuse.backward import MicroBatches
from shoal.fuse.grads import Gradients
from shoal.fuse.member_changes import AttributeSync
from shoal.fuse.optim import traced
from shoal.fuse.optim.adagrad import RMSprop
from shoal.fuse.optim.adam import Adam
from shoal.fuse.optim.fused import FusedOptimizer
from shoal.fuse.optim.param_group_batch import ParamGroupBatch
from shoal.fuse.optim.param_state import ParamState
from shoal.fuse.optim.sgd import SGD
from shoal.fuse.rules import conv, dropout, embedding, linear, loss, norm
from shoal.fuse.rules.table import RULES
from shoal.fuse.stacked import Stacked
from shoal.train import fused_stepper, metrics

__all__ = ["FAULTS", "Fault"]

Make = Callable[[Any], Any]
"""Function that makes the faulty function of the right one."""


@dataclass(frozen=True)
class Fault:
    """A fault.

    Args:
        owner: module, class or rule whose attribute is replaced.
        attribute: name of a function.
        programs: in which it may show, the surest first.
        rare: shows in single steps between the windows of the proof, which finds it by chance; not in a quick run.
    """

    name: str
    owner: Any
    attribute: str
    make: Make
    programs: tuple[str, ...]
    rare: bool = False

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Context manager in which Shoal has the fault."""
        right = inspect.getattr_static(self.owner, self.attribute)
        faulty = self.make(right.__func__ if isinstance(right, classmethod) else right)
        self._put(classmethod(faulty) if isinstance(right, classmethod) else faulty)
        try:
            yield
        finally:
            self._put(right)

    def _put(self, value: Any) -> None:
        (setattr if isinstance(self.owner, type) else object.__setattr__)(self.owner, self.attribute, value)


def _rolled(value: Any) -> Any:
    """The next member's row in place of each member's; what all members share stays."""
    return Stacked(value.whole.roll(1, 0)) if isinstance(value, Stacked) else value


def _nothing(right: Any) -> Any:
    return lambda *arguments, **options: None


def _square_transposed(right: Any) -> Any:
    return lambda x, w, b: right(x, w.transpose(1, 2) if w.shape[1] == w.shape[2] else w, b)


def _first_bias_frozen(right: Any) -> Any:
    return lambda x, w, b: right(x, w, None if b is None else torch.cat([b[:1].detach(), b[1:]]))


def _channels_of_weights_rolled(right: Any) -> Any:
    def run(name: str, call: Any, input: Any, weight: Any, *others: Any) -> Any:
        return right(name, call, input, Stacked(weight.whole.roll(1, 1)), *others)

    return run


def _without_bias(right: Any) -> Any:
    return lambda name, call, input, weight, bias, *others: right(name, call, input, weight, None, *others)


def _statistics_unwritten(right: Any) -> Any:
    def normalise(x: Tensor, mean: Any, var: Any, *others: Any) -> Tensor:
        return right(x, mean.clone(), var.clone(), *others)

    return normalise


def _other_momentum(right: Any) -> Any:
    def normalise(
        x: Tensor, mean: Any, var: Any, scale: Any, shift: Any, training: bool, rate: float, eps: float
    ) -> Any:
        return right(x, mean, var, scale, shift, training, rate * 1.01, eps)

    return normalise


def _scale_of_neighbour(right: Any) -> Any:
    def normalise(x: Tensor, weight: Any, *others: Any) -> Tensor:
        return right(x, weight.roll(1, 0), *others)

    return normalise


def _by_width(right: Any) -> Any:
    return lambda func, q, k, v, *others, **options: right(
        func, q, k, v, *others, **{**options, "scale": 1 / q.shape[-1]}
    )


def _sees_ahead(right: Any) -> Any:
    return lambda func, q, k, v, *others, **options: right(func, q, k, v, *others, **{**options, "is_causal": False})


def _next_row(right: Any) -> Any:
    return lambda input, weight: (right(input, weight) + 1).clamp(max=weight.whole.shape[0] * weight.whole.shape[1] - 1)


def _padding_trained(right: Any) -> Any:
    return lambda func, input, weight, padding_idx=None, **options: right(func, input, weight, None, **options)


def _one_label_more(right: Any) -> Any:
    return lambda *arguments: right(*arguments) + 1


def _unsmoothed(right: Any) -> Any:
    return lambda func, *arguments, **options: right(func, *arguments, **{**options, "label_smoothing": 0.0})


def _mean_over_members(right: Any) -> Any:
    def reduce(values: Tensor, reduction: str) -> Tensor:
        found = right(values, reduction)
        return found.mean().expand(len(found)) if reduction == "mean" else found

    return reduce


def _channels_rolled(right: Any) -> Any:
    def run(func: Any, input: Any, *others: Any, **options: Any) -> Any:
        found = right(func, input, *others, **options)
        return Stacked(found.whole.roll(1, 2)) if isinstance(found, Stacked) else found

    return run


def _hidden_rolled(right: Any) -> Any:
    def run(*arguments: Any, **options: Any) -> Any:
        output, *state = right(*arguments, **options)
        return _rolled(output), *state

    return run


def _parsed(change: Callable[[ParamGroupBatch, int, Any], Any]) -> Make:
    """Make a `ParamGroupBatch._parse` whose hyper-parameters are changed."""

    def make(right: Any) -> Any:
        def parse(self: ParamGroupBatch, b: int, settings: Any) -> Any:
            rule, hyperparameters = right(self, b, settings)
            return rule, change(self, b, hyperparameters)

        return parse

    return make


def _neighbours_rate(batch: ParamGroupBatch, b: int, given: Any) -> Any:
    return (batch._members[b - 1].param_groups[batch._group]["lr"], *given[1:])


def _undecayed(batch: ParamGroupBatch, b: int, given: Any) -> Any:
    return (*given[:-1], 0.0)  # the last hyper-parameter of SGD and Adam


def _settings(i: int, value: Any) -> Make:
    """Make a `_parse` of a rule that reads another value of one setting."""

    def make(right: Any) -> Any:
        def parse(cls: Any, settings: Any) -> Any:
            given = list(settings)
            given[i] = value(given[i])
            return right(cls, given)

        return parse

    return make


def _counted(change: Callable[[Tensor], Tensor]) -> Make:
    """Make a `FusedOptimizer.step` whose counts of updates are changed before it."""

    def make(right: Any) -> Any:
        def stepped(self: Any, *arguments: Any, **options: Any) -> None:
            for member in self.members:
                for state in member.state.values():
                    state["step"].copy_(change(state["step"]))
            right(self, *arguments, **options)

        return stepped

    return make


def _every(k: int) -> Make:
    """Make a method that does nothing at each k-th call of an object."""

    def make(right: Any) -> Any:
        def stepped(self: Any, *arguments: Any, **options: Any) -> Any:
            self.calls_of_fault = getattr(self, "calls_of_fault", 0) + 1
            return None if self.calls_of_fault % k == 0 else right(self, *arguments, **options)

        return stepped

    return make


def _constant_coefficients(right: Any) -> Any:
    def advance(self: Any, counters: Any, coefficients: Any) -> None:
        before = [rows.clone() for rows in coefficients]
        right(self, counters, coefficients)
        for rows, old in zip(coefficients, before, strict=True):
            rows.copy_(old)

    return advance


def _momentum_lost(right: Any) -> Any:
    def step_each(self: Any, *arguments: Any, **options: Any) -> None:
        if getattr(self, "last_of_fault", 0) != self.array.tick - 1:  # the step before was taken in another mode
            for member in self.members:
                for state in member.state.values():
                    state["momentum_buffer"].zero_()
        self.last_of_fault = self.array.tick
        right(self, *arguments, **options)

    return step_each


def _norm_of_all(right: Any) -> Any:
    def norms(self: Any, order: float) -> Tensor:
        found = right(self, order)
        return found.norm().expand(len(found))

    return norms


def _unclipped(right: Any) -> Any:
    def init(self: Any, array: Any, optimizer: Any, loss: Any, limits: Any, scales: Any) -> None:
        right(self, array, optimizer, loss, None, scales)

    return init


def _first_batch(right: Any) -> Any:
    return lambda self, given: right(self, self.__dict__.setdefault("first_of_fault", given))


def _first_keys(right: Any) -> Any:
    return lambda self: self.__dict__.setdefault("first_of_fault", right(self))


def _copied_buffers(right: Any) -> Any:
    def inputs(self: Any) -> Any:
        first = len(self._traced.params)
        found = right(self)
        return [t.clone() if first <= i < first + len(self._others) else t for i, t in enumerate(found)]

    return inputs


def _first_batch_alone(right: Any) -> Any:
    def backward(array: Any, loss: Any, scaler: Any, batch: Any, shards: Any = ()) -> Tensor:
        short = MicroBatches(batch.batches[:1], batch.weights[:1]) if isinstance(batch, MicroBatches) else batch
        return right(array, loss, scaler, short, shards)

    return backward


def _one_momentum(right: Any) -> Any:
    def stacked(self: Any, rows: Any, begins: Any) -> Tensor:
        return right(self, [*rows[1:], rows[0]], begins)

    return stacked


def _members_rolled(right: Any) -> Any:
    return lambda rows, **options: right([*rows[1:], rows[0]], **options)


def _keys(change: Callable[[Any, Any], Any]) -> Make:
    """Make a `member_keys` of other seeds and ticks."""
    return lambda right: lambda seeds, ticks: right(*change(list(seeds), list(ticks)))


def _unscaled(right: Any) -> Any:
    def run(func: Any, input: Any, p: Any = 0.5, *others: Any, **options: Any) -> Any:
        found = right(func, input, p, *others, **options)
        return Stacked(found.whole * (1 - p)) if found is not input and len(found.whole) > 1 else found

    return run


def _always_first(right: Any) -> Any:
    def taken(self: Any, drawing: Any = None) -> Tensor:
        found = right(self, drawing)
        if not self.single_member:
            self.calls = 0
        return found

    return taken


def _masks_longer(right: Any) -> Any:
    def keep(keys: Tensor, shape: Any, drop: Any, device: Any) -> Tensor:
        found = right(keys, shape, drop, device)
        return found[:1].expand(len(keys), *found.shape[1:]) if len(keys) > 1 else found

    return keep


def _values_rolled(right: Any) -> Any:
    def of_batch(*arguments: Any) -> Any:
        values, outputs = right(*arguments)
        return {name: _rolled(value) for name, value in values.items()}, outputs

    return of_batch


def _other_output(right: Any) -> Any:
    return lambda b, column: right((b + 1) % len(column), column)


def _means_rolled(right: Any) -> Any:
    def add(self: Any, values: Any, size: int) -> None:
        right(self, {name: column.roll(1, 0) for name, column in values.items()}, size)

    return add


def _sizes_alike(right: Any) -> Any:
    return lambda self, values, size: right(self, values, 1)


def _returns(value: Any) -> Make:
    return lambda right: lambda *arguments: value


SCHEDULED = ("Scheduled", "Captured")
ADAM = ("Dropout", "Convolution", "Attention", "Labels")
LINEAR = ("Program", "Accumulated", "OwnStep", "Clipped", "Long")
FAULTS = (
    # rules
    Fault(
        "linear: the next member's weight",
        linear,
        "batched_linear",
        lambda right: lambda x, w, b: right(x, w.roll(1, 0), b),
        LINEAR,
    ),
    Fault("linear: a square weight transposed", linear, "batched_linear", _square_transposed, LINEAR),
    Fault("linear: no bias", linear, "batched_linear", lambda right: lambda x, w, b: right(x, w, None), LINEAR),
    Fault("linear: a bias without gradient", linear, "batched_linear", _first_bias_frozen, LINEAR),
    Fault("conv: no bias", conv, "_run_all_members", _without_bias, ("Convolution",)),
    Fault("conv: outputs in another order", conv, "_run_all_members", _channels_of_weights_rolled, ("Convolution",)),
    Fault("batch norm: statistics not written", norm, "_batch_norm_of_all", _statistics_unwritten, ("Convolution",)),
    Fault("batch norm: another momentum", norm, "_batch_norm_of_all", _other_momentum, ("Convolution",)),
    Fault(
        "layer norm: another epsilon",
        norm,
        "_at_once",
        lambda right: lambda x, w, b, shape, eps: right(x, w, b, shape, 2 * eps),
        ("Attention",),
    ),
    Fault("layer norm: the next member's scale", norm, "_at_once", _scale_of_neighbour, ("Attention",)),
    Fault("attention: scaled by the width", RULES[F.scaled_dot_product_attention], "run", _by_width, ("Attention",)),
    Fault("attention: not causal", RULES[F.scaled_dot_product_attention], "run", _sees_ahead, ("Attention",)),
    Fault("embedding: the row below", embedding, "_table_indices", _next_row, ("Attention",)),
    Fault("embedding: the padding row trained", RULES[F.embedding], "run", _padding_trained, ("Attention",)),
    Fault(
        "cross entropy: a mean over one more",
        loss,
        "_weight_sum",
        _one_label_more,
        ("Labels", "Convolution", "Attention"),
    ),
    Fault(
        "cross entropy: not smoothed",
        RULES[F.cross_entropy],
        "run",
        _unsmoothed,
        ("Labels", "Convolution", "Attention"),
    ),
    Fault("squared error: a mean over members", loss, "reduce_losses", _mean_over_members, LINEAR),
    Fault("pooling: channels in another order", RULES[torch.max_pool1d], "run", _channels_rolled, ("Convolution",)),
    Fault("LSTM: the next member's output", RULES[torch.lstm], "run", _hidden_rolled, ("Recurrent",)),
    # optimizers
    Fault(
        "a neighbour's learning rate",
        ParamGroupBatch,
        "_parse",
        _parsed(_neighbours_rate),
        (*LINEAR, *ADAM, "Recurrent"),
    ),
    Fault("no weight decay", ParamGroupBatch, "_parse", _parsed(_undecayed), ("Program", "Long", *ADAM)),
    Fault("SGD: no Nesterov", SGD, "_parse", _settings(4, lambda value: False), ("Program", "Clipped", "Long")),
    Fault("SGD: a little more momentum", SGD, "_parse", _settings(1, lambda value: 1.001 * value), LINEAR),
    Fault("Adam: betas swapped", Adam, "_parse", _settings(1, lambda value: value[::-1]), ADAM),
    Fault("Adam: another epsilon", Adam, "_parse", _settings(2, lambda value: 2 * value), ADAM),
    Fault("Adam: decay in the gradient", Adam, "_parse", _settings(6, lambda value: False), ("Labels", "Convolution")),
    Fault("Adam: AMSGrad forgotten", Adam, "_parse", _settings(4, lambda value: False), ("Labels", "Convolution")),
    Fault("Adam: no bias correction", FusedOptimizer, "step", _counted(lambda count: count + 10**6), ADAM),
    Fault("Adam: every update counted twice", FusedOptimizer, "step", _counted(lambda count: count + 1), ADAM),
    Fault("RMSprop: a little more alpha", RMSprop, "_parse", _settings(1, lambda value: value**0.9), ("Recurrent",)),
    Fault("every fifth update skipped", FusedOptimizer, "step", _every(5), (*LINEAR, *ADAM)),
    Fault("every twenty-fifth update skipped", FusedOptimizer, "step", _every(25), ("Long",), rare=True),
    Fault("momentum lost after eager steps", FusedOptimizer, "step_each", _momentum_lost, LINEAR),
    Fault("clipping by the norm of all", Gradients, "norms", _norm_of_all, ("Clipped", "Captured")),
    Fault(
        "clipping by a neighbour's limit",
        Gradients,
        "clip_",
        lambda right: lambda self, limits, norms: right(self, limits.roll(1), norms),
        ("Clipped", "Captured"),
    ),
    Fault("plain steps are not clipped", plain_step.PlainStep, "__init__", _unclipped, ("Clipped",)),
    # graphs
    Fault("graph: the first batch", capture.CapturedStep, "_run", _first_batch, ("Captured", "Buffers")),
    Fault("graph: the first random numbers", capture.CapturedStep, "_next_keys", _first_keys, ("Captured",)),
    Fault("graph: constant coefficients", traced.TracedStep, "advance", _constant_coefficients, ("Captured",)),
    Fault(
        "graph: learning rates not read",
        ParamGroupBatch,
        "refresh",
        lambda right: lambda self: bool(self._settings) or right(self),
        SCHEDULED,
    ),
    Fault("graph: buffers not written", capture.CapturedStep, "_inputs", _copied_buffers, ("Buffers",)),
    Fault("graph: not clipped", capture.CapturedStep, "_clip", _nothing, ("Captured",)),
    # state
    Fault("a replaced buffer not kept", array_state, "_commit", _nothing, ("State",)),
    Fault(
        "a member's replaced buffer not kept",
        ArrayState,
        "commit_member",
        lambda right: ArrayState.restore_member,
        ("State",),
    ),
    Fault("attributes not given to members", AttributeSync, "push", _nothing, ("State",)),
    Fault("attributes not taken from members", AttributeSync, "pull", _returns(False), ("State",)),
    Fault("gradients added twice", FusedOptimizer, "zero_grad", _nothing, LINEAR),
    Fault("only the first accumulated batch", step, "backward", _first_batch_alone, ("Accumulated",)),
    Fault("a neighbour's optimizer state", ParamState, "_stack_moments", _one_momentum, ("Leaves",)),
    Fault("a neighbour's parameters", slots, "stack_rows", _members_rolled, ("Program", "Leaves", "State")),
    Fault(
        "evaluation mode after validation",
        ModelArray,
        "train",
        lambda right: lambda self, mode=True: right(self, False),
        ("Dropout", "Convolution", "State"),
    ),
    # validation
    Fault(
        "training mode in validation", ModelArray, "eval", lambda right: lambda self: self, ("Dropout", "Convolution")
    ),
    Fault("a neighbour's metrics", fused_stepper, "validation_values", _values_rolled, ("Program", "Evaluated")),
    Fault("a neighbour's means", metrics.MetricMeans, "add", _means_rolled, ("Program", "Evaluated")),
    Fault("means without sizes of batches", metrics.MetricMeans, "add", _sizes_alike, ("Program", "Labels")),
    Fault("a neighbour's outputs", metrics, "_member_slice", _other_output, ("Evaluated",)),
    Fault("any output reused", metrics, "_is_alike", _returns(True), ("Noisy",)),
    # random numbers
    Fault(
        "one seed for all members",
        array_state,
        "member_keys",
        _keys(lambda seeds, ticks: (seeds[:1] * len(seeds), ticks)),
        ("Dropout",),
    ),
    Fault(
        "a neighbour's seed",
        array_state,
        "member_keys",
        _keys(lambda seeds, ticks: (seeds[1:] + seeds[:1], ticks)),
        ("Dropout",),
    ),
    Fault(
        "random numbers of the last step",
        array_state,
        "member_keys",
        _keys(lambda seeds, ticks: (seeds, [tick - 1 for tick in ticks])),
        ("Dropout",),
    ),
    Fault("dropout: one mask for all members", dropout, "keep_mask", _masks_longer, ("Dropout", "Captured")),
    Fault("dropout: kept elements not scaled", RULES[F.dropout], "run", _unscaled, ("Dropout",)),
    Fault("dropout: the same mask again", randomness.RandomSource, "next", _always_first, ("Dropout", "Captured")),
)
"""All faults; names are unique."""
