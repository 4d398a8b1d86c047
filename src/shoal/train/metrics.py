"""Computes loss and metrics of validation batches, and their means over a validation set."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial, update_wrapper
from itertools import chain, islice
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook
from torch.utils import _pytree as pytree

from shoal.core.errors import TaskError
from shoal.core.objective import metric_fault
from shoal.core.space import is_number
from shoal.core.trial import step_seed
from shoal.fuse.container_sync import MODULE_ATTRIBUTES
from shoal.fuse.generators import seed_all
from shoal.fuse.stacked import Stacked
from shoal.fuse.unfused_module import modules_of
from shoal.task import Task, call
from shoal.train.trial_runtime import TrialRuntime, check_scalar, synchronize

__all__ = ["ForwardReuse", "MetricMeans", "Precision", "ValidationMetrics", "task_loss", "validation_values"]


Precision = Callable[[], AbstractContextManager[Any]]
"""Function that returns a context to run a model in: autocast, or a null context."""


class MetricMeans:
    """Means of the metrics of several trials. The mean of a metric is over the samples of the batches that have it."""

    def __init__(self, members: int) -> None:
        self._members = members
        self._batches: dict[str, list[tuple[Tensor, list[int]]]] = {}
        """Name -> values of each batch, float64 [B], and the samples of each trial that they are of."""

    def add(self, values: Mapping[str, Tensor], size: int) -> None:
        """Add a batch of `size` samples for which all trials have the same metrics, [B] each."""
        for name, column in values.items():
            check_scalar(name, column, axes=1)
            self._add(name, column.detach().to(torch.float64, copy=True), [size] * self._members)

    def add_each(self, found: Sequence[Mapping[str, Any]], size: int) -> None:
        """Add a batch of `size` samples for which each trial has its own metrics."""
        for name in dict.fromkeys(name for values in found for name in values):
            column = [torch.as_tensor(values.get(name, 0.0)) for values in found]
            for value in column:
                check_scalar(name, value)
            place = next(value.device for value, values in zip(column, found, strict=True) if name in values)
            converted = [value.detach().to(place, torch.float64, copy=True) for value in column]
            stacked = torch.stack(converted) if len(converted) > 1 else converted[0].view(1)
            self._add(name, stacked, [size if name in values else 0 for values in found])

    def _add(self, name: str, column: Tensor, samples: list[int]) -> None:
        """Keep the values of a batch; they are copies, since a metric may be a tensor that the user changes later."""
        self._batches.setdefault(name, []).append((column, samples))

    def per_trial(self) -> list[dict[str, float]]:
        """Return the means of each trial."""
        return [means for means, _ in self.with_errors()]

    def with_errors(self) -> list[tuple[dict[str, float], dict[str, float]]]:
        """Return the means of each trial with their standard errors; all values are read from the device at once, and
        summed in order.

        A batch of w samples has the variance of a sample over w, so the batches' squared distances from the mean, times
        w, estimate that of a sample. A mean over one batch, or one that is not finite, has no standard error.
        """
        found: list[tuple[dict[str, float], dict[str, float]]] = [({}, {}) for _ in range(self._members)]
        columns = [column for batches in self._batches.values() for column, _ in batches]
        elsewhere = [column for column in columns if column.device.type != "cpu"]  # others were Python numbers
        read = iter(torch.stack(elsewhere).tolist() if elsewhere else ())
        rows = iter([column.tolist() if column.device.type == "cpu" else next(read) for column in columns])
        for name, batches in self._batches.items():
            mine = list(islice(rows, len(batches)))
            for b, (means, errors) in enumerate(found):
                values = [(row[b], counts[b]) for row, (_, counts) in zip(mine, batches, strict=True) if counts[b]]
                if not values:
                    continue
                total = sum(count for _, count in values)
                means[name] = mean = sum(value * count for value, count in values) / total
                spread = sum(count * (value - mean) * (value - mean) for value, count in values)
                if len(values) > 1 and math.isfinite(spread):
                    errors[name] = math.sqrt(spread / (len(values) - 1) / total)
        return found


PINNED_BYTES = 256 << 20
"""Most bytes of the outputs of a validation that are copied into pinned memory, which torch keeps for the next one."""


class ValidationMetrics:
    """Metrics of several trials: means over the samples of a set, and the results of the task's `evaluate`."""

    def __init__(self, task: Task, runtimes: Sequence[TrialRuntime]) -> None:
        self._task = task
        self._runtimes = runtimes
        self._means = MetricMeans(len(runtimes))
        self._outputs: list[list[Any]] = [[] for _ in runtimes]
        self._pinned = 0  # bytes of outputs in pinned memory

    def add(self, values: Mapping[str, Tensor], outputs: Any, size: int) -> None:
        """Add a batch of `size` samples with metrics and outputs of all trials; each tensor is [B, ...]."""
        self._means.add(values, size)
        if outputs is not None:
            outputs = pytree.tree_map_only(Tensor, self._to_host, outputs)
            for b, kept in enumerate(self._outputs):
                kept.append(pytree.tree_map_only(Tensor, partial(_member_slice, b), outputs))

    def add_each(self, found: Sequence[tuple[Mapping[str, Any], Any]], size: int) -> None:
        """Add a batch of `size` samples with metrics and outputs of each trial."""
        self._means.add_each([values for values, _ in found], size)
        for kept, (_, outputs) in zip(self._outputs, found, strict=True):
            if outputs is not None:
                kept.append(pytree.tree_map_only(Tensor, self._to_host, outputs))

    def so_far(self) -> list[tuple[dict[str, float], list[Any]]]:
        """Return means of the metrics, and outputs, of each trial for the batches so far."""
        self._wait_for_outputs()
        return list(zip(self._means.per_trial(), map(list, self._outputs), strict=True))

    def per_trial(
        self, own: Callable[[int], AbstractContextManager[None]] = lambda b: nullcontext()
    ) -> list[dict[str, float]]:
        """Return the metrics of each trial; its runtime gets the standard errors of the means.

        Args:
            own: Function that returns a context for the call of `evaluate` of a trial, by its index.
        """
        means, errors = zip(*self._means.with_errors(), strict=True)
        self._wait_for_outputs()
        for b, (values, outputs, runtime) in enumerate(zip(means, self._outputs, self._runtimes, strict=True)):
            runtime.errors = errors[b]
            if outputs and not runtime.failure:  # few metrics accept the NaNs of a failed trial
                with own(b):
                    values.update(self._evaluated(runtime, outputs, values))
        return list(means)

    def _to_host(self, tensor: Tensor) -> Tensor:
        """Copy outputs to the host, up to `PINNED_BYTES` into pinned memory, for which nothing waits yet."""
        self._pinned += tensor.nbytes
        return tensor.detach().to("cpu", non_blocking=self._pinned <= PINNED_BYTES)

    def _wait_for_outputs(self) -> None:
        """Wait for the copies of outputs into pinned memory."""
        if any(self._outputs):
            synchronize(self._runtimes[0].device)

    def _evaluated(self, runtime: TrialRuntime, outputs: list[Any], values: Mapping[str, float]) -> dict[str, float]:
        seed_all(step_seed(runtime.trial.seed, -len(outputs) - 1), runtime.device)  # the same alone and in an array
        found = call(self._task, "evaluate", outputs, config=runtime.trial.config)
        _check_metrics("evaluate", found)
        if twice := sorted(found.keys() & values.keys()):
            raise TaskError(f"the task's `evaluate` returns {twice[0]!r}, which is a name of `metrics` or of the loss")
        return {str(name): float(value) for name, value in found.items()}


def task_loss(task: Task, precision: Precision, model: nn.Module, batch: Any) -> Tensor:
    """Return the task's loss for a batch, a real scalar."""
    with precision():
        loss: Tensor = call(task, "loss", model, batch)
    check_scalar("loss", loss)
    return loss


def validation_values(
    task: Task, precision: Precision, reuse: "ForwardReuse", model: nn.Module, batch: Any
) -> tuple[dict[str, Any], Any]:
    """Return loss and metrics of a validation batch, and the task's `outputs`, for a model or an array of models.

    Numbers among the outputs are nodes without leaves, which the next map over them replaces by the numbers.
    """
    with reuse.batch(model) as begin, precision():
        loss = task_loss(task, precision, model, batch)
        begin("metrics")
        metrics = call(task, "metrics", model, batch)
        begin("outputs")
        outputs = pytree.tree_map(_as_node, call(task, "outputs", model, batch))
    _check_metrics("metrics", metrics)
    if "valid_loss" in metrics:
        raise TaskError("the task's `metrics` must not return 'valid_loss': that is its `loss`; choose another name")
    return {"valid_loss": loss, **{name: _as_float64(value) for name, value in metrics.items()}}, outputs


class _Number:
    """A number that a map over a tree leaves as it is."""

    def __init__(self, value: Any) -> None:
        self.value = value


pytree.register_pytree_node(_Number, lambda node: ([], node.value), lambda leaves, value: value)


def _as_node(leaf: Any) -> Any:
    plain = isinstance(leaf, (bool, int, float, np.number, np.bool_)) and not isinstance(leaf, Tensor)
    return _Number(leaf) if plain else leaf


def _member_slice(b: int, column: Tensor) -> Tensor:
    return column[b]


def _check_metrics(method: str, metrics: Any) -> None:
    """Check what `metrics` or `evaluate` of a task returned."""
    if not isinstance(metrics, Mapping):
        raise TaskError(
            f"the task's `{method}` must return a mapping of names to scalars, such as {{'accuracy': accuracy}}, got "
            f"{'a tensor' if isinstance(metrics, Tensor) else type(metrics).__name__}; return {{}} if there are none"
        )
    for name, value in metrics.items():
        if not isinstance(value, (Tensor, int, float, np.number, np.bool_)):
            raise TaskError(f"the task's metric {name!r} must be a scalar tensor or a number, got {value!r}")
        if method == "evaluate" and isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
            raise TaskError(
                f"the task's `evaluate` must return one real number for {name!r}, got {value.dtype} of shape "
                f"{tuple(value.shape)}; reduce it, or give each part a name of its own"
            )
        if is_number(value) and (fault := metric_fault(str(name), value)):
            raise TaskError(fault)


def _as_float64(value: Any) -> Any:
    """Convert a Python number to float64, since torch's default dtype would lose digits; keep tensors."""
    return torch.tensor(float(value), dtype=torch.float64) if is_number(value) else value


_VersionedLeaves = list[tuple[Any, int]]
"""Objects with their version counters of in-place changes. Holding the objects keeps their identities unique."""


_CALL: Callable[..., Any] = nn.Module.__call__


@dataclass
class _Call:
    """A call of a model: its arguments with copies of those that are masks, by index, state of the model before it, and
    result."""

    given: _VersionedLeaves
    masks: dict[int, Tensor]
    spec: pytree.TreeSpec | None
    state: tuple[list[Any], list[int]]
    result: Any
    returned: _VersionedLeaves

    def equals(self, other: "_Call") -> bool:
        """Whether a call has the same arguments, and the model the same state."""
        if self.spec != other.spec or len(self.given) != len(other.given):
            return False
        pairs = zip(self.given, other.given, strict=True)
        if not all(_same(a, b) or self._equal_masks(index, b[0]) for index, (a, b) in enumerate(pairs)):
            return False
        (ours, versions), (theirs, other_versions) = self.state, other.state
        return versions == other_versions and len(ours) == len(theirs) and all(map(is_, ours, theirs))

    def _equal_masks(self, index: int, other: Any) -> bool:
        """Whether an argument has the values of another one, such as a mask that each method computes, and still has
        them: a model that changes it is to change the other one as well."""
        mine, (given, _) = self.masks.get(index), self.given[index]
        if mine is None or vars(given) or not _is_mask(other):
            return False
        return mine.dtype == other.dtype and torch.equal(mine, other) and torch.equal(mine, given)

    @property
    def intact(self) -> bool:
        """Whether the result has not been changed in place."""
        return _unchanged(self.returned, _versioned_leaves(self.result))


class ForwardReuse:
    """Reuses the output of the one call of a model in `loss` for the one call in `metrics` or `outputs`.

    In the first batch of passes 1, 4, 16, ... over the validation set the model is called each time. A method may then
    use the output of `loss` if each of the two called the model once, with the same arguments and the same attributes
    of the model, and both outputs were equal. In other batches it gets that output if arguments and attributes are the
    same again, and nothing was changed in place; integers on the host may also be other tensors with the same values.
    Models with hooks, or with a `__call__` of their own, are always called.

    Calls are intercepted by a `__call__` of the model's class, so user code that copies or saves the model, or reads
    its signature, finds the model unchanged.

    Args:
        observes: Whether calls are compared; otherwise the model runs as in plain PyTorch.
    """

    def __init__(self, observes: bool = True) -> None:
        self._observes = observes
        self._passes, self._next_proof = 0, 1
        self._proving = True
        self._allowed: frozenset[str] = frozenset()
        self._state: _State | None = None

    def begin_pass(self) -> None:
        """Begin a pass over the validation set."""
        self._passes += 1
        self._state = None
        self._proving = self._passes >= self._next_proof
        if self._proving:
            self._next_proof *= 4

    @contextmanager
    def batch(self, model: nn.Module) -> Iterator[Callable[[str], None]]:
        """Context manager for a batch; it yields a function to call with the name of each method of the task."""
        kind: Any = type(model)
        looks = self._observes and (self._proving or self._allowed)
        if not looks or kind is nn.Module or kind.__call__ is not _CALL:
            yield lambda called: None
            return
        state = self._state = self._state or _State(model)
        method = "loss"
        calls: dict[str, _Call | None] = {}
        """Method of the task -> its call of the model; None if it calls it more than once, or with hooks."""

        def name(called: str) -> None:
            nonlocal method
            method = called

        def observed_call(called: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
            if called is not model:
                return _CALL(called, *args, **kwargs)
            if state.has_hooks() or torch.is_grad_enabled():  # an output belongs to the graph of its own call
                calls[method] = None
                return _CALL(model, *args, **kwargs)
            if len(args) == 1 and not kwargs and type(args[0]) is Tensor:  # the common case
                given, spec = [args[0]], None
            else:
                given, spec = pytree.tree_flatten((args, kwargs))
            masks = {index: each.clone() for index, each in enumerate(given) if method == "loss" and _is_mask(each)}
            call = _Call(_versions(given), masks, spec, state.read(), None, [])
            first = calls.get("loss") if method in self._allowed and not self._proving else None
            if first is not None and first.equals(call) and first.intact:
                return first.result
            call.result = _CALL(model, *args, **kwargs)
            call.returned = _versioned_leaves(call.result)
            calls[method] = None if method in calls else call
            return call.result

        kind.__call__ = update_wrapper(observed_call, _CALL)
        try:
            yield name
        finally:
            del kind.__call__
        if self._proving:
            self._proving = False
            of_loss = calls.get("loss")
            self._allowed = frozenset(
                name for name in ("metrics", "outputs") if of_loss and _is_alike(of_loss, calls.get(name))
            )


def _is_alike(of_loss: _Call, other: _Call | None) -> bool:
    """Whether a method has called the model once, as `loss` has, with equal and intact results."""
    if other is None or not of_loss.equals(other):
        return False
    return of_loss.intact and other.intact and _equal(of_loss.result, other.result)


def _equal(first: Any, second: Any) -> bool:
    """Whether two outputs have one structure and equal values."""
    (ours, spec), (theirs, other) = pytree.tree_flatten(first), pytree.tree_flatten(second)
    return spec == other and all(_equal_leaf(a, b) for a, b in zip(ours, theirs, strict=True))


def _equal_leaf(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if isinstance(a, Stacked) and isinstance(b, Stacked):
        return torch.equal(a.whole, b.whole)
    plain = type(a) is type(b) and isinstance(a, (Tensor, int, float, str))
    return plain and (torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b))


class _State:
    """Reads all attributes of a model, with the entries of containers and objects in them."""

    def __init__(self, model: nn.Module) -> None:
        modules = [vars(module) for module in modules_of(model)]
        found = (item for held in modules for item in held.items() if type(item[1]) not in _PLAIN)
        own = {
            id(value): value
            for name, value in found
            if _is_container(value) and (name not in MODULE_ATTRIBUTES or value)
        }
        tables = [value if isinstance(value, (dict, *_SEQUENCES)) else vars(value) for value in own.values()]
        self._dicts = [*modules, *(table for table in tables if isinstance(table, dict))]
        self._sequences = [table for table in tables if not isinstance(table, dict)]
        registered = [each for held in modules for name in ("_parameters", "_buffers") for each in held[name].values()]
        wholes = [each.whole if isinstance(each, Stacked) else each for each in registered if each is not None]
        self._tensors = [each for each in wholes if not each.is_inference()]
        self._modules = modules

    def has_hooks(self) -> bool:
        """Whether a call of the model calls functions that were registered with it, or with all modules."""
        if _has_any_global_hook():  # type: ignore[no-untyped-call]
            return True
        return any(held["_forward_hooks"] or held["_forward_pre_hooks"] for held in self._modules)

    def read(self) -> tuple[list[Any], list[int]]:
        """Return the values, to be compared by identity, and the versions of parameters and buffers."""
        found = list(chain.from_iterable(map(dict.values, self._dicts)))
        found += chain.from_iterable(self._sequences)
        return found, [tensor._version for tensor in self._tensors]


_PLAIN = {bool, int, float, str, type(None)}
_SEQUENCES = (list, tuple, set, frozenset, deque)


def _is_container(value: Any) -> bool:
    """Whether a value is a container or an object with attributes."""
    if isinstance(value, (dict, *_SEQUENCES)):
        return True
    return hasattr(value, "__dict__") and not isinstance(value, (nn.Module, Tensor, type))


def _versioned_leaves(tree: Any) -> _VersionedLeaves:
    return _versions([tree] if isinstance(tree, Tensor) else pytree.tree_leaves(tree))


def _versions(leaves: Iterable[Any]) -> _VersionedLeaves:
    return [(leaf, _version_of(leaf)) for leaf in leaves]


def _version_of(leaf: Any) -> int:
    data = leaf.whole if isinstance(leaf, Stacked) else leaf
    return data._version if isinstance(data, Tensor) and not data.is_inference() else 0


def _unchanged(before: _VersionedLeaves, now: _VersionedLeaves) -> bool:
    return len(before) == len(now) and all(map(_same, before, now))


def _same(before: tuple[Any, int], now: tuple[Any, int]) -> bool:
    (a, version), (b, other) = before, now
    return version == other and (a is b or (type(a) in _PLAIN and type(a) is type(b) and bool(a == b)))


def _is_mask(leaf: Any) -> bool:
    """Whether a leaf is a plain tensor of integers on the host, which is compared by its values."""
    if type(leaf) is not Tensor or leaf.device.type != "cpu" or leaf.layout != torch.strided:
        return False
    return leaf.dtype in _INTEGERS and not vars(leaf) and torch._C._functorch.peek_interpreter_stack() is None


_INTEGERS = {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}
