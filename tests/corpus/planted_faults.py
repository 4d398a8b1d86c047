"""Small faults of Shoal, each in one function that only arrays use, for `test_planted_faults.py`.

The copies of the proof train by code that plain trials use as well (`PlainStepper`, averages of weights, the random
keys of one trial): the proof cannot find a fault in that, so none is planted there.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from planted_programs import (
    Accumulated,
    Attention,
    Buffers,
    Captured,
    Clipped,
    Convolution,
    Dropout,
    Evaluated,
    Labels,
    Leaves,
    Long,
    Noisy,
    OwnStep,
    Program,
    Recurrent,
    Scheduled,
    State,
)

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


@dataclass(frozen=True)
class Fault:
    """A fault.

    Args:
        wrong: is called in place of the right function, with that before its arguments.
        owner: module, class or rule that has the function.
        attribute: its name there.
        programs: in which the fault shows, the surest first.
    """

    wrong: Callable[..., Any]
    owner: Any
    attribute: str
    programs: tuple[type[Program], ...]

    def plant(self) -> None:
        """Give Shoal the fault, in this process and for good."""
        right = inspect.getattr_static(self.owner, self.attribute)
        call = right.__func__ if isinstance(right, classmethod) else right

        def faulty(*arguments, **options):
            return self.wrong(call, *arguments, **options)

        put = setattr if isinstance(self.owner, type) else object.__setattr__
        put(self.owner, self.attribute, classmethod(faulty) if isinstance(right, classmethod) else faulty)


FAULTS: dict[str, Fault] = {}
"""All faults by name, in the order of this file."""


def fault(owner, attribute, *programs):
    """Decorator of a function that is wrong in place of another one."""

    def register(wrong):
        FAULTS[wrong.__name__] = Fault(wrong, owner, attribute, programs)
        return wrong

    return register


def rolled(value):
    """The next member's row in place of each member's; what all members share stays."""
    return Stacked(value.whole.roll(1, 0)) if isinstance(value, Stacked) else value


def is_due(self, every):
    """Whether a call of an object is the last of so many."""
    self.calls_of_fault = getattr(self, "calls_of_fault", 0) + 1
    return self.calls_of_fault % every == 0


def replaced(settings, i, value):
    """The settings of an optimizer, one of them another."""
    return [*settings[:i], value, *settings[i + 1 :]]


def count_updates(self, change):
    """Let an optimizer count its updates otherwise."""
    for member in self.members:
        for state in member.state.values():
            state["step"].copy_(change(state["step"]))


ADAM = (Dropout, Convolution, Attention, Labels)
CLASSES = (Labels, Convolution, Attention)
LINEAR = (Program, Accumulated, OwnStep, Clipped, Long)
ATTENTION = RULES[F.scaled_dot_product_attention]

# Rules


@fault(linear, "batched_linear", *LINEAR)
def linear_of_the_next_members_weight(right, x, w, b):
    return right(x, w.roll(1, 0), b)


@fault(linear, "batched_linear", *LINEAR)
def linear_of_a_square_weight_transposed(right, x, w, b):
    return right(x, w.transpose(1, 2) if w.shape[1] == w.shape[2] else w, b)


@fault(linear, "batched_linear", *LINEAR)
def linear_without_bias(right, x, w, b):
    return right(x, w, None)


@fault(linear, "batched_linear", *LINEAR)
def linear_whose_first_bias_has_no_gradient(right, x, w, b):
    return right(x, w, None if b is None else torch.cat([b[:1].detach(), b[1:]]))


@fault(conv, "_run_all_members", Convolution)
def convolution_without_bias(right, name, call, input, weight, bias, *others):
    return right(name, call, input, weight, None, *others)


@fault(conv, "_run_all_members", Convolution)
def convolution_of_outputs_in_another_order(right, name, call, input, weight, *others):
    return right(name, call, input, Stacked(weight.whole.roll(1, 1)), *others)


@fault(norm, "_batch_norm_of_all", Convolution)
def batch_norm_does_not_write_statistics(right, x, mean, var, *others):
    return right(x, mean.clone(), var.clone(), *others)


@fault(norm, "_batch_norm_of_all", Convolution)
def batch_norm_of_another_momentum(right, x, mean, var, scale, shift, training, momentum, eps):
    return right(x, mean, var, scale, shift, training, momentum * 1.01, eps)


@fault(norm, "_at_once", Attention)
def layer_norm_of_another_epsilon(right, x, weight, bias, shape, eps):
    return right(x, weight, bias, shape, 2 * eps)


@fault(norm, "_at_once", Attention)
def layer_norm_of_the_next_members_scale(right, x, weight, *others):
    return right(x, weight.roll(1, 0), *others)


@fault(ATTENTION, "run", Attention)
def attention_scaled_by_the_width(right, func, q, *others, **options):
    return right(func, q, *others, **{**options, "scale": 1 / q.shape[-1]})


@fault(ATTENTION, "run", Attention)
def attention_that_is_not_causal(right, *arguments, **options):
    return right(*arguments, **{**options, "is_causal": False})


@fault(embedding, "_table_indices", Attention)
def embedding_of_the_row_below(right, input, weight):
    return (right(input, weight) + 1).clamp(max=weight.whole.shape[0] * weight.whole.shape[1] - 1)


@fault(RULES[F.embedding], "run", Attention)
def embedding_trains_the_padding_row(right, func, input, weight, padding_idx=None, **options):
    return right(func, input, weight, None, **options)


@fault(loss, "_weight_sum", *CLASSES)
def cross_entropy_of_one_label_more(right, *arguments):
    return right(*arguments) + 1


@fault(RULES[F.cross_entropy], "run", *CLASSES)
def cross_entropy_is_not_smoothed(right, *arguments, **options):
    return right(*arguments, **{**options, "label_smoothing": 0.0})


@fault(loss, "reduce_losses", *LINEAR)
def squared_error_is_a_mean_over_members(right, values, reduction):
    found = right(values, reduction)
    return found.mean().expand(len(found)) if reduction == "mean" else found


@fault(RULES[torch.max_pool1d], "run", Convolution)
def pooling_of_channels_in_another_order(right, *arguments, **options):
    found = right(*arguments, **options)
    return Stacked(found.whole.roll(1, 2)) if isinstance(found, Stacked) else found


@fault(RULES[torch.lstm], "run", Recurrent)
def lstm_of_the_next_member(right, *arguments, **options):
    output, *state = right(*arguments, **options)
    return rolled(output), *state


# Optimizers and clipping


@fault(ParamGroupBatch, "_parse", *LINEAR, *ADAM, Recurrent)
def a_neighbours_learning_rate(right, self, b, settings):
    rule, given = right(self, b, settings)
    return rule, (self._members[b - 1].param_groups[self._group]["lr"], *given[1:])


@fault(ParamGroupBatch, "_parse", Program, Long, *ADAM)
def no_weight_decay(right, self, b, settings):
    rule, given = right(self, b, settings)
    return rule, (*given[:-1], 0.0)  # the last hyper-parameter of SGD and Adam


@fault(SGD, "_parse", Program, Clipped, Long)
def sgd_without_nesterov(right, cls, settings):
    return right(cls, replaced(settings, 4, False))


@fault(SGD, "_parse", *LINEAR)
def sgd_of_a_little_more_momentum(right, cls, settings):
    return right(cls, replaced(settings, 1, 1.001 * settings[1]))


@fault(Adam, "_parse", *ADAM)
def adam_of_swapped_betas(right, cls, settings):
    return right(cls, replaced(settings, 1, settings[1][::-1]))


@fault(Adam, "_parse", *ADAM)
def adam_of_another_epsilon(right, cls, settings):
    return right(cls, replaced(settings, 2, 2 * settings[2]))


@fault(Adam, "_parse", Labels, Convolution)
def adam_with_decay_in_the_gradient(right, cls, settings):
    return right(cls, replaced(settings, 6, False))


@fault(FusedOptimizer, "step", *ADAM)
def adam_without_bias_correction(right, self, *arguments, **options):
    count_updates(self, lambda count: count + 10**6)
    right(self, *arguments, **options)


@fault(FusedOptimizer, "step", *ADAM)
def adam_counts_every_update_twice(right, self, *arguments, **options):
    count_updates(self, lambda count: count + 1)
    right(self, *arguments, **options)


@fault(RMSprop, "_parse", Recurrent)
def rmsprop_of_a_little_more_alpha(right, cls, settings):
    return right(cls, replaced(settings, 1, settings[1] ** 0.9))


@fault(FusedOptimizer, "step", *LINEAR, *ADAM)
def every_fifth_update_skipped(right, self, *arguments, **options):
    if not is_due(self, 5):
        right(self, *arguments, **options)


@fault(FusedOptimizer, "step", Long)
def every_twenty_fifth_update_skipped(right, self, *arguments, **options):
    if not is_due(self, 25):
        right(self, *arguments, **options)


@fault(FusedOptimizer, "step_each", Program, Accumulated, Clipped, Long)
def momentum_lost_after_eager_steps(right, self, *arguments, **options):
    if getattr(self, "last_of_fault", 0) != self.array.tick - 1:  # the step before was taken in another mode
        for member in self.members:
            for state in member.state.values():
                state["momentum_buffer"].zero_()
    self.last_of_fault = self.array.tick
    right(self, *arguments, **options)


@fault(Gradients, "norms", Clipped, Captured)
def clipped_by_the_norm_of_all(right, self, order):
    found = right(self, order)
    return found.norm().expand(len(found))


@fault(Gradients, "clip_", Clipped, Captured)
def clipped_by_a_neighbours_limit(right, self, limits, norms):
    return right(self, limits.roll(1), norms)


@fault(plain_step.PlainStep, "__init__", Clipped)
def plain_steps_are_not_clipped(right, self, array, optimizer, loss, limits, scales):
    right(self, array, optimizer, loss, None, scales)


# Graphs


@fault(capture.CapturedStep, "_run", Captured, Buffers)
def graph_of_the_first_batch(right, self, given):
    return right(self, self.__dict__.setdefault("first_of_fault", given))


@fault(capture.CapturedStep, "_next_keys", Captured)
def graph_of_the_first_random_numbers(right, self):
    return self.__dict__.setdefault("first_of_fault", right(self))


@fault(traced.TracedStep, "advance", Captured)
def graph_of_constant_coefficients(right, self, counters, coefficients):
    before = [rows.clone() for rows in coefficients]
    right(self, counters, coefficients)
    for rows, old in zip(coefficients, before, strict=True):
        rows.copy_(old)


@fault(ParamGroupBatch, "refresh", Scheduled, Captured)
def learning_rates_are_not_read_again(right, self):
    return bool(self._settings) or right(self)


@fault(capture.CapturedStep, "_inputs", Buffers)
def graph_that_does_not_write_buffers(right, self):
    first = len(self._traced.params)
    last = first + len(self._others)
    return [tensor.clone() if first <= i < last else tensor for i, tensor in enumerate(right(self))]


@fault(capture.CapturedStep, "_clip", Captured)
def graph_that_is_not_clipped(right, self, *arguments, **options):
    return None


# State


@fault(array_state, "_commit", State)
def a_replaced_buffer_not_kept(right, *arguments, **options):
    return None


@fault(ArrayState, "commit_member", State)
def a_members_replaced_buffer_not_kept(right, self, *arguments, **options):
    return self.restore_member(*arguments, **options)


@fault(AttributeSync, "push", State)
def attributes_not_given_to_members(right, self, *arguments, **options):
    return None


@fault(AttributeSync, "pull", State)
def attributes_not_taken_from_members(right, self, *arguments):
    return False


@fault(FusedOptimizer, "zero_grad", *LINEAR)
def gradients_added_twice(right, self, *arguments, **options):
    return None


@fault(step, "backward", Accumulated)
def only_the_first_accumulated_batch(right, array, loss, scaler, batch, shards=()):
    short = MicroBatches(batch.batches[:1], batch.weights[:1]) if isinstance(batch, MicroBatches) else batch
    return right(array, loss, scaler, short, shards)


@fault(ParamState, "_stack_moments", Leaves)
def a_neighbours_optimizer_state(right, self, rows, begins):
    return right(self, [*rows[1:], rows[0]], begins)


@fault(slots, "stack_rows", Program, Leaves, State)
def a_neighbours_parameters(right, rows, **options):
    return right([*rows[1:], rows[0]], **options)


@fault(ModelArray, "train", Dropout, Convolution, State)
def evaluation_mode_after_validation(right, self, mode=True):
    return right(self, False)


# Validation


@fault(ModelArray, "eval", Dropout, Convolution)
def training_mode_in_validation(right, self):
    return self


@fault(fused_stepper, "validation_values", Program, Evaluated)
def a_neighbours_metrics(right, *arguments):
    values, outputs = right(*arguments)
    return {name: rolled(value) for name, value in values.items()}, outputs


@fault(metrics.MetricMeans, "add", Program, Evaluated)
def a_neighbours_means(right, self, values, size):
    right(self, {name: column.roll(1, 0) for name, column in values.items()}, size)


@fault(metrics.MetricMeans, "add", Program, Labels)
def means_without_sizes_of_batches(right, self, values, size):
    right(self, values, 1)


@fault(metrics, "_member_slice", Evaluated)
def a_neighbours_outputs(right, b, column):
    return right((b + 1) % len(column), column)


@fault(metrics, "_is_alike", Noisy)
def any_output_reused(right, *arguments):
    return True


# Random numbers


@fault(array_state, "member_keys", Dropout)
def one_seed_for_all_members(right, seeds, ticks):
    return right(list(seeds)[:1] * len(seeds), ticks)


@fault(array_state, "member_keys", Dropout)
def a_neighbours_seed(right, seeds, ticks):
    return right([*seeds[1:], seeds[0]], ticks)


@fault(array_state, "member_keys", Dropout)
def random_numbers_of_the_last_step(right, seeds, ticks):
    return right(seeds, [tick - 1 for tick in ticks])


@fault(dropout, "keep_mask", Dropout, Captured)
def dropout_of_one_mask_for_all_members(right, keys, shape, drop, device):
    found = right(keys, shape, drop, device)
    return found[:1].expand(len(keys), *found.shape[1:]) if len(keys) > 1 else found


@fault(RULES[F.dropout], "run", Dropout)
def dropout_that_does_not_scale(right, func, input, p=0.5, *others, **options):
    found = right(func, input, p, *others, **options)
    return Stacked(found.whole * (1 - p)) if found is not input and len(found.whole) > 1 else found


@fault(randomness.RandomSource, "next", Dropout, Captured)
def dropout_of_the_same_mask_again(right, self, drawing=None):
    found = right(self, drawing)
    if not self.single_member:
        self.calls = 0
    return found
