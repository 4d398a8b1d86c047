"""Captures a whole training step of an array (forward, backward, clipping, update) as one graph, and compiles it.

The passes, in order:

1. Run the forward pass of all members on substitutes of their tensors (`ModelArray.open`).
2. Compute the gradient of the sum of the members' losses (autograd, traced together with the forward pass).
3. Update parameters and optimizer state in place (`FusedOptimizer.traced`; updates are counted outside of the trace).
   With `MemberSteps`, first add the gradients to those of steps that continue; update members whose step ends.
4. Watch two runs of passes 1 to 3, and refuse a step that a graph would freeze. They run on copies of all tensors but
   frozen parameters, unless the step writes to these; the second may be the record of pass 6.
5. To compile the step, trace it into one graph of plain tensor functions (`make_fx`), fuse these into few kernels
   (Inductor, which reuses code in Shoal's cache directory; another process may do so before this one, which then ends
   here, and captures the step once more after that), and compare the compiled step with the graph on such copies
   (`check_compiled`).
6. On a GPU, record all kernels, to launch them together (CUDA graph). The record also counts the update, and computes
   the update rules' coefficients and the keys of the random numbers, so that a step only copies its batch.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.modules import module as all_modules
from torch.utils import _pytree as pytree

from shoal.core.errors import FusionError
from shoal.fuse.array import ModelArray
from shoal.fuse.autotune import autocast_state
from shoal.fuse.backward import MemberSteps, micro_batches, total, weighted
from shoal.fuse.compile_cache import use_shared_directory
from shoal.fuse.constants import to_device
from shoal.fuse.grads import Gradients
from shoal.fuse.inductor import check_compiled, compile_graph
from shoal.fuse.optim.fused import FusedOptimizer
from shoal.fuse.optim.traced import TracedStep
from shoal.fuse.randomness import member_keys
from shoal.fuse.replay import DeviceKeys, Replay
from shoal.fuse.rows import is_dense, unsqueeze_like
from shoal.fuse.slots import unalias_grad
from shoal.fuse.stacked import NeedsMemberError, Stacked
from shoal.fuse.transaction import refuse_changes
from shoal.fuse.unfused_module import modules_of
from shoal.fuse.watched_step import FrozenWriteError, WatchedStep, frozen_hook, guarded_trace

__all__ = ["CapturedStep", "CompiledAheadError", "records_graphs"]


class CompiledAheadError(FusionError):
    """The step may be captured later, since another process is to compile it before."""


class CapturedStep:
    """Replaces an eager forward pass, loss, backward pass and optimizer step, for batches of one shape.

    The step must have run eagerly before.

    Args:
        compiling: Whether Inductor compiles the step. Otherwise a GPU records its kernels as they are, and on a CPU the
            traced graph runs.
        trained: Parameters of the array that get gradients; by default those that have one now.
        max_norms: Largest norm of each member's gradients, [B]; None for no limit.
        ahead: Given the graph and its inputs, returns whether another process is to compile it before; None if none is.

    Raises:
        FusionError: The step cannot be captured, or its compiled code is wrong.
        CompiledAheadError: Another process is to compile the step before.
        torch.OutOfMemoryError: There is not enough memory to capture it.
    """

    def __init__(
        self,
        array: ModelArray,
        optimizer: FusedOptimizer,
        loss: Callable[..., Any],
        batch: Any,
        compiling: bool = True,
        trained: Sequence[Tensor] | None = None,
        max_norms: Tensor | None = None,
        ahead: Callable[[GraphModule, Sequence[Tensor]], bool] | None = None,
    ) -> None:
        array.check_batch(batch)
        array.state.sync_from_members(search=True)
        self._array = array
        self._optimizer = optimizer
        self._loss = loss
        leaves, self._spec = pytree.tree_flatten(batch)
        self._shapes = _shapes(leaves)
        self._runs = len(micro_batches(batch))
        self._max_norms = None if max_norms is None else max_norms.to(next(array.parameters()).device)
        if trained is None:
            trained = [p for p in array.parameters() if p.grad is not None]
        traced = optimizer.traced(trained, kernels=not compiling)
        if traced is None:
            raise FusionError("an optimizer without a fused rule cannot be captured")
        self._traced: TracedStep = traced
        self._member_of = {id(own): b for _, b, own in array.unfused_parameters()}
        self._member_steps = isinstance(batch, MemberSteps)
        sums = [p.grad for p in traced.params if p.grad is not None] if self._member_steps else []
        if self._member_steps and len(sums) < len(traced.params):
            raise FusionError("a parameter has no gradient from this batch, and the members' steps continue")
        self._sums = sums
        """Gradients of steps that continue after a batch, if members' steps have different numbers of batches."""
        tensors = array.state.tensors()
        self._identities = _identities(tensors)
        updated = set(map(id, traced.params))
        self._others = [tensor for tensor in tensors if id(tensor) not in updated]
        self._untrained = [p for p in optimizer.params if id(p) not in updated]
        self._versions = (optimizer.version, array.version)
        self._floats = array.state.floats()
        self._modules = [*array.members[0].modules(), *array.separate.modules()]
        self._modes = self._training()
        _refuse_hooks(self._modules, traced.params)
        self._device = next((p.device for p in array.parameters()), torch.device("cpu"))
        self._unused: Tensor | None = None
        """Keys of random numbers, if the step draws none."""
        self._keys = DeviceKeys(array, self._runs, self._device) if records_graphs(self._device) else None
        others = enumerate(self._others, len(traced.params))
        self._lent = {i for i, own in others if isinstance(own, nn.Parameter) and not own.requires_grad}
        """Indices of frozen parameters among the inputs that a run is not given as copies."""
        self._replay: Replay | None = None
        self._strides: list[tuple[int, ...] | None] = []
        """Strides of the batch for which the step was captured, tensor by tensor; None for a sparse tensor."""
        self._function = self._captured(leaves, compiling, ahead)

    def fits(self, batch: Any) -> bool:
        """Whether a batch has the captured shapes, and the models, the optimizer and the hooks are as captured."""
        state = self._array.state
        state.sync_from_members()
        self._optimizer.refresh()  # its version changes if parameters have been moved
        leaves, spec = pytree.tree_flatten(batch)
        same = (self._optimizer.version, state.version) == self._versions and state.floats() == self._floats
        same = same and self._training() == self._modes and not _hooked(self._modules, self._traced.params)
        if self._array.partial:  # a member may have replaced a tensor of an unfused submodule
            same = same and _identities(state.tensors()) == self._identities
        if not same or spec != self._spec or _shapes(leaves) != self._shapes:
            return False
        if self._member_steps and any(p.grad is not None for p in self._untrained):  # of a step that continues
            return False
        return self._replay is None or self._replay.fits()

    @property
    def is_outdated(self) -> bool:
        """Whether a setting that the record has as a constant has changed; it is an input of a new record."""
        batches = self._traced.batches
        return any(batch.frozen is not None and not batch.param_batch.changes_rates_only for batch in batches)

    def __call__(self, batch: Any) -> Tensor:
        """Take one step; returns the losses, [B]."""
        given = _tensors(pytree.tree_leaves(batch))
        for param, own in zip(self._traced.params, self._sums, strict=True) if self._member_steps else ():
            if param.grad is not own:  # an eager step was taken, or the gradients of all members begin anew
                own.zero_() if param.grad is None else own.copy_(param.grad)
                param.grad = own
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the compiler warns about itself
            losses = self._run(given) if self._replay is None else self._replay(given)
        self._array.tick += self._runs
        self._optimizer.mark_stepped()
        for each in self._traced.batches if self._member_steps else ():
            each.param_batch.forget_calls()
        return losses

    def _run(self, given: Sequence[Tensor]) -> Tensor:
        """Take a step without a CUDA graph; if it raises an error, the update is not counted."""
        step = self._traced
        before = _copies(step.counters)
        step.advance(step.counters, step.coefficients, self._ends(given))
        laid_out = list(map(_laid_out, given, self._strides))
        try:
            losses = self._function(*self._inputs(), self._next_keys(), *laid_out)
        except BaseException:
            for counter, saved in zip(step.counters, before, strict=True):
                counter.copy_(saved)
            raise
        for tensor, used in zip(given, laid_out, strict=True):
            if used is not tensor and not torch.equal(used, tensor):
                tensor.copy_(used)  # the loss has written to it
        return losses

    def _ends(self, given: Sequence[Tensor]) -> Tensor | None:
        """Whether the step of each member ends, [B]; None if all do. `MemberSteps` have it last."""
        return given[-1] if self._member_steps else None

    def _training(self) -> list[Any]:
        return [autocast_state(), *map(_MODE, self._modules)]

    def _inputs(self) -> list[Tensor]:
        step = self._traced
        return [t.detach() for t in (*step.params, *self._others, *step.state, *self._sums, *step.coefficients)]

    def _next_keys(self) -> Tensor:
        """The keys of the members' random numbers in the next step: int64 [B], or [runs, B] for several runs."""
        if self._unused is not None:
            return self._unused
        seeds, ticks = self._array.seeds, self._array.ticks
        of_each = [member_keys(seeds, [tick + later for tick in ticks]) for later in range(self._runs)]
        return to_device(torch.tensor(of_each if self._runs > 1 else of_each[0]), self._device)

    def _captured(
        self,
        leaves: Sequence[Any],
        compiling: bool,
        ahead: Callable[[GraphModule, Sequence[Tensor]], bool] | None,
    ) -> Callable[..., Tensor]:
        if compiling:
            use_shared_directory()  # first, since torch sets the variable when tracing imports its compiler
        held, given, keys = self._inputs(), _copies(_tensors(leaves)), self._next_keys()
        self._strides = [tensor.stride() if tensor.layout is torch.strided else None for tensor in given]
        example, on_gpu = [*held, keys, *given], records_graphs(self._device)
        try:
            try:
                step, first = self._watched(leaves, example)
            except FrozenWriteError:  # as by a model that keeps an average of another one
                self._lent.clear()
                step, first = self._watched(leaves, example)
            if not step.uses_keys:
                self._unused, self._keys = keys, None
            if on_gpu and not compiling:
                try:
                    self._replay = self._recorded(step, given)
                    _check_same(first, step.functions())
                    return step
                except torch.OutOfMemoryError:
                    raise
                except RuntimeError:
                    pass  # a trace holds tensors that the loss makes of numbers, a graph does not
            _check_same(first, step.watch(self._copied(example)))
            with guarded_trace(), _one_fake_mode():
                graph = make_fx(step.fn, tracing_mode="real")(*self._copied(example))
            if compiling and ahead is not None and ahead(graph, example):
                raise CompiledAheadError("the step is compiled before it is captured")
            function = self._compiled(graph, example) if compiling else graph
            if on_gpu:
                with torch.no_grad():
                    function(*self._copied(example))
                    self._replay = self._recorded(function, given)
        except (torch.OutOfMemoryError, CompiledAheadError):
            raise
        except (Exception, NeedsMemberError) as error:  # tracers and compilers raise any error
            raise FusionError(f"the step cannot be captured: {type(error).__name__}: {error}") from error
        return function

    def _watched(self, leaves: Sequence[Any], example: Sequence[Tensor]) -> tuple[WatchedStep, list[Any]]:
        """Watch a first run of the step on copies; returns it and its functions."""
        shared = [tensor for _, tensor, _ in self._array.shared_parameters()]
        keys = len(example) - 1 - len(_tensors(leaves))
        step = WatchedStep(self._step(leaves, shared), keys, [*shared, *(example[i] for i in self._lent)])
        return step, step.watch(self._copied(example))

    def _copied(self, example: Sequence[Tensor]) -> list[Tensor]:
        """Copies of the inputs, except for frozen parameters that the step does not write to."""
        return [tensor if i in self._lent else _copy(tensor) for i, tensor in enumerate(example)]

    def _recorded(self, fn: Callable[..., Tensor], given: Sequence[Tensor]) -> "Replay":
        """Record the count of an update, its coefficients, the keys, and the step; `fn` has run once.

        What else is recorded runs first on copies, since it loads libraries, which recording must not do.
        """
        step, keys, held, counters = self._traced, self._keys, self._inputs(), self._traced.counters
        step.advance(_copies(counters), _copies(step.coefficients), self._ends(given))
        if keys is not None:
            keys.write()
            keys.next()
            keys.count()

        def run(given: Sequence[Tensor]) -> Tensor:
            step.advance(counters, step.coefficients, self._ends(given))
            return fn(*held, self._next_keys() if keys is None else keys.next(), *given)

        return Replay(run, lambda: [*self._others, *step.counters], given, keys, self._device)

    def _compiled(self, graph: GraphModule, example: list[Tensor]) -> Callable[..., Tensor]:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # the compiler warns about itself
            compiled = compile_graph(graph, example)
            check_compiled(graph, compiled, example, self._compared(example), self._copied)
        return compiled

    def _compared(self, example: Sequence[Tensor]) -> list[Sequence[int]]:
        """Indices of the inputs that a compiled step must change alike, in groups that change by like amounts.

        They are the optimizers' state, or else the parameters; floating-point buffers; and others, such as counts. A
        batch of `MemberSteps` changes the gradients of steps that continue, and perhaps nothing else.

        Updates are not compared: Adam makes a step of full size out of a gradient that is zero but for rounding.
        """
        params, others = len(self._traced.params), len(self._others)
        state = range(params + others, params + others + len(self._traced.state))
        sums = range(state.stop, state.stop + len(self._sums))
        of_rules = [*(i for i in state if example[i].dim() > 1), *sums] or range(params)
        rest = [i for i in range(params, params + others) if i not in self._lent]
        rest = [i for i in rest if example[i].layout is torch.strided]
        exact = [i for i in rest if not (example[i].is_floating_point() or example[i].is_complex())]
        return [of_rules, [i for i in rest if i not in exact], exact]

    def _step(self, leaves: Sequence[Any], constants: Sequence[Tensor]) -> Callable[..., Tensor]:
        """The step as a function of tensors only: those of `_inputs`, then those of `_given`."""
        step = self._traced
        counts = [len(step.params), len(self._others), len(step.state), len(self._sums), len(step.coefficients), 1]

        def run(*tensors: Tensor) -> Tensor:
            left = iter(tensors)
            params, others, state, sums, coefficients, (keys,) = ([next(left) for _ in range(n)] for n in counts)
            batch = pytree.tree_unflatten([_like(x, left) for x in leaves], self._spec)
            live = [param.detach().requires_grad_(param.is_floating_point()) for param in params]
            idle = [
                other.detach().requires_grad_() if own.requires_grad else other  # otherwise it would look frozen
                for other, own in zip(others, self._others, strict=True)
            ]
            stand_ins = dict(zip(map(id, (*step.params, *self._others)), (*live, *idle), strict=True))
            grads: list[Tensor] = []
            taken = []
            for (part, weight), part_keys in zip(micro_batches(batch), keys if self._runs > 1 else [keys], strict=True):
                with self._array.state.substituted(stand_ins):  # also for checkpointed parts, which run again
                    with self._array.open(part_keys) as model:
                        modules = list(modules_of(model))
                        _refuse_hooks(modules, ())
                        _gather_weights([*modules, *self._array.separate.modules()])
                        with self._guarded(model, [self._loss], constants):
                            losses = weighted(self._loss(model, part).whole, weight)
                    with self._guarded(model, (), constants):
                        more = torch.autograd.grad(losses.sum(), live)
                grads = [a + b for a, b in zip(grads, more, strict=True)] if grads else list(more)
                taken.append(losses.detach())
            if isinstance(batch, MemberSteps):
                grads = self._accumulated(sums, grads, batch.begins)
            if self._max_norms is not None:
                self._clip(grads, self._max_norms)
            step.apply(params, grads, state, coefficients, batch.ends if isinstance(batch, MemberSteps) else None)
            return total(taken)

        return run

    def _accumulated(self, sums: Sequence[Tensor], grads: Sequence[Tensor], begins: Tensor) -> list[Tensor]:
        """Add the gradients of a batch to those of steps that continue, in place; returns the sums, in other memory."""
        added = []
        for own, grad, param in zip(sums, grads, self._traced.params, strict=True):
            b = self._member_of.get(id(param))
            mask = begins[b] if b is not None else unsqueeze_like(begins, own)
            added.append(own.masked_fill(mask, 0) + grad)
            own.copy_(added[-1])
        return added

    def _guarded(self, model: Any, functions: Sequence[Any], constants: Sequence[Tensor]) -> Any:
        """Refuse changes that a graph would freeze; not while it is recorded, as values cannot be compared then."""
        if records_graphs(self._device) and torch.cuda.is_current_stream_capturing():
            return nullcontext()
        return refuse_changes(model, functions, constants)

    def _clip(self, grads: Sequence[Tensor], max_norms: Tensor) -> None:
        of_param = dict(zip(map(id, self._traced.params), grads, strict=True))
        stacked = [of_param[id(data)] for _, data, _ in self._array.stacked_tensors() if id(data) in of_param]
        per_member = [(b, of_param[id(own)]) for _, b, own in self._array.unfused_parameters() if id(own) in of_param]
        found = Gradients(len(self._array), stacked, per_member)
        found.clip_(max_norms, found.norms(2.0))


def records_graphs(device: torch.device) -> bool:
    """Whether the kernels of a step on this device can be recorded as a graph."""
    return device.type == "cuda"


def _check_same(functions: list[Any], others: list[Any]) -> None:
    """Refuse a step of which two runs differ: a counter, or random numbers that are not torch's, would be constants."""
    if functions != others:
        raise FusionError("two runs of it differ")


@contextmanager
def _one_fake_mode() -> Iterator[None]:
    """Let `make_fx` use one fake mode for all shapes, since making one per shape takes most of the time of a trace."""
    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        yield


def _gather_weights(modules: Iterable[nn.Module]) -> None:
    """Let recurrent modules update their lists of weights, as they do at the start of each run."""
    for module in modules:
        if isinstance(module, nn.RNNBase):
            module._update_flat_weights()


def _identities(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Identify tensors such that replacing, freezing or unfreezing one, or laying it out anew, is noticed."""
    return [(id(each), each.requires_grad, each.layout is torch.strided and each.stride()) for each in tensors]


def _tensors(leaves: Sequence[Any]) -> list[Tensor]:
    """The tensors of a batch, plain ones."""
    return [_whole(leaf) for leaf in leaves if isinstance(leaf, Tensor)]


def _whole(leaf: Tensor) -> Tensor:
    return leaf.whole if isinstance(leaf, Stacked) else leaf


def _like(leaf: Any, tensors: Iterator[Tensor]) -> Any:
    """A leaf of the batch, rebuilt from the next traced tensor."""
    if not isinstance(leaf, Tensor):
        return leaf
    return Stacked(next(tensors)) if isinstance(leaf, Stacked) else next(tensors)


def _copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def _copy(tensor: Tensor) -> Tensor:
    """A copy with the strides of a tensor, for which a step is compiled, even if the tensor has gaps or overlaps."""
    if tensor.layout is not torch.strided or is_dense(tensor):
        return tensor.clone()
    span = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span,), (1,)).clone().as_strided(tensor.shape, tensor.stride())


def _laid_out(tensor: Tensor, stride: tuple[int, ...] | None) -> Tensor:
    """A tensor of a batch with the strides for which the step was captured."""
    if stride is None or tensor.stride() == stride:
        return tensor
    return torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _shapes(leaves: Sequence[Any]) -> list[Any]:
    """Kinds of the tensors among the leaves of a batch, and other leaves themselves: a captured step is for these."""
    return [(type(leaf), *_kind(_whole(leaf))) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


_kind = attrgetter("shape", "dtype", "layout", "device")


def _hooked(modules: Iterable[nn.Module], parameters: Sequence[Tensor]) -> bool:
    """Whether autograd calls user code in the backward pass."""
    if all_modules._global_backward_hooks or all_modules._global_backward_pre_hooks:
        return True
    of_parameters = chain.from_iterable(map(dict.values, filter(None, map(_HOOKS, parameters))))
    return (
        any(map(any, map(_MODULE_HOOKS, modules)))
        or any(map(_ACCUMULATION_HOOKS, parameters))
        or not _OWN_HOOKS.issuperset(of_parameters)
    )


_MODE = attrgetter("training")
_MODULE_HOOKS = attrgetter("_backward_hooks", "_backward_pre_hooks")
_HOOKS = attrgetter("_backward_hooks")
_ACCUMULATION_HOOKS = attrgetter("_post_accumulate_grad_hooks")
_OWN_HOOKS = frozenset({unalias_grad})


def _refuse_hooks(modules: Iterable[nn.Module], parameters: Sequence[Tensor]) -> None:
    """Refuse to trace a step for which `_hooked` is true."""
    if _hooked(modules, parameters):
        raise frozen_hook()
