"""Compiles the graph of a step by Inductor, in this process, or before that in one beside it.

Inductor finds its own code again by the graph, its inputs and its settings. So a process beside this one compiles for a
minute while steps continue, and this process then compiles the same graph in the seconds that reading the code takes.
Neither needs the tensors, only their shapes. Inductor is given the graph itself, which `torch.compile` would trace.

Compilers have faults, so a compiled step is compared with its graph. In half precision both are far from each other:
each rounds every result, and a compiler rounds fewer of them. So both are compared with the same graph in float32.
"""

import fcntl
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Collection, Sequence
from math import sqrt
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from shoal.core.errors import FusionError
from shoal.fuse.compile_cache import COMPILED
from shoal.host import process_settings

__all__ = ["Float32Interpreter", "check_compiled", "compile_ahead", "compile_graph", "is_compiling", "serve"]

MIN_FREE_BYTES = 1 << 30
"""Free memory of a GPU that a compiler beside this process needs: for a CUDA context, and what Inductor measures."""

MAX_SECONDS = 600.0
"""Most seconds of a compiler beside this process, which then ends, so that one that hangs gives its right back."""

NICENESS = 10
"""Niceness of a compiler beside this process, such that processes that train get the cores first."""

_HALF = (torch.bfloat16, torch.float16)

_IN_HALF_ONLY = ("flash_attention", "cudnn_attention")
"""Parts of the names of functions that a GPU computes in half precision only."""

_IN_FLOAT = {torch.ops.aten._softmax.default, torch.ops.aten._log_softmax.default}
"""Functions whose last argument says that they widen a half tensor."""

_Shape = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]
"""Size, stride, dtype and device of a tensor."""

_compiler: subprocess.Popen[bytes] | None = None
"""The last compiler beside this process."""


def compile_graph(graph: GraphModule, example: Sequence[Tensor]) -> Callable[..., Tensor]:
    """Compile a graph of plain tensor functions that returns a tensor; `example` are its inputs."""
    plain, constants = _without_constants(graph)
    of_constants = _shapes(constants)
    compiled = _compiled(plain, [*_shapes(example), *of_constants])

    def run(*tensors: Tensor) -> Tensor:
        if _shapes(constants) != of_constants:  # as after `.data = ` of a teacher
            return graph(*tensors)  # type: ignore[no-any-return]
        return compiled(*tensors, *constants)[0]  # type: ignore[no-any-return]

    return run


def check_compiled(
    graph: GraphModule,
    compiled: Callable[..., Tensor],
    example: Sequence[Tensor],
    compared: Sequence[Collection[int]],
    copied: Callable[[Sequence[Tensor]], list[Tensor]],
) -> None:
    """Run both on copies of the same inputs, and compare the losses and some of the inputs, which a step changes.

    If losses and compared inputs are float32 or float64, the two may differ by a part of the change, and by rounding in
    the coarsest of their dtypes. In half precision the compiled step may be further by this part from the step in
    float32 than twice the distance of the graph.

    Args:
        graph: The step as a graph of plain tensor functions; it returns the losses, [B].
        compiled: The compiled step.
        example: Inputs of a step.
        compared: Indices of the inputs that are compared, in groups, each of which is judged by its own change.
        copied: Copies the inputs that the step may change; the others both read.

    Raises:
        FusionError: They compute different values.
    """
    expected, got = copied(example), copied(example)
    losses, found = graph(*expected), compiled(*got)
    held = (example[i] for group in compared for i in group)
    dtypes = {each.dtype for each in (losses, *held) if each.is_floating_point()}
    tolerance = 1e-9 if dtypes == {torch.float64} else 1e-2
    if _has_half(graph, example):
        true = [_widened(tensor) for tensor in copied(example)]
        with torch.autocast(example[0].device.type, enabled=False):
            true_losses = Float32Interpreter(graph).run(*true)
        allowed = 2 * _distance([losses], [true_losses]) + tolerance * float(true_losses.double().norm())
        same = _distance([found], [true_losses]) <= allowed
        for group in compared:
            allowed = 2 * _change(expected, true, group) + tolerance * _change(true, example, group)
            same = same and _distance(got, true, group) <= allowed
    else:
        same = torch.allclose(losses, found, rtol=tolerance, atol=0, equal_nan=True)
        rounding = max(torch.finfo(dtype).eps for dtype in dtypes)
        for group in compared:
            allowed = tolerance * _change(expected, example, group) + rounding * _change(expected, None, group)
            same = same and _distance(got, expected, group) <= allowed
    if not same:
        raise FusionError("the compiled step and the trace compute different values; this is a compiler fault")


def compile_ahead(graph: GraphModule, example: Sequence[Tensor], lock: int) -> None:
    """Let a process beside this one compile a graph, such that `compile_graph` finds the code.

    It has the right to compile the step until it ends, and ends with this process. On a GPU it takes a CUDA context.

    Args:
        graph: As for `compile_graph`.
        example: As for `compile_graph`.
        lock: `CompileRecord.lock`.

    Raises:
        FusionError: Inductor keeps no code, or the GPU has no memory for a further process.
        Exception: The graph cannot be given to another process, for any reason that `pickle` has.
    """
    global _compiler
    from torch._inductor import config  # whose import takes seconds

    if config.force_disable_caches or not config.fx_graph_cache:
        raise FusionError("Inductor's caches are disabled")
    device = example[0].device
    if device.type == "cuda" and (free := torch.cuda.mem_get_info(device)[0]) < MIN_FREE_BYTES:
        raise FusionError(f"{device} has {free >> 20} MiB of free memory, and a compiler needs {MIN_FREE_BYTES >> 20}")
    plain, constants = _without_constants(graph)
    settings = process_settings.current(), torch.backends.cuda.matmul.fp32_precision, config.save_config_portable()
    job = _nodes(plain), _shapes([*example, *constants]), torch.get_num_threads(), settings
    inherited = fcntl.fcntl(lock, fcntl.F_DUPFD_CLOEXEC, 3)  # a lower one would be a standard stream of the process
    try:
        with tempfile.TemporaryFile() as file:
            pickle.dump(job, file)
            file.seek(0)
            command = [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(inherited), str(os.getpid())]
            _compiler = subprocess.Popen(command, stdin=file, stdout=subprocess.DEVNULL, pass_fds=[inherited])
    finally:
        os.close(inherited)


_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from shoal.fuse.inductor import serve; serve(*map(int, sys.argv[2:]))"
)


def is_compiling() -> bool:
    """Whether a compiler beside this process runs."""
    return _compiler is not None and _compiler.poll() is None


def _compiled(graph: GraphModule, shapes: Sequence[_Shape]) -> Callable[..., Any]:
    from torch._inductor import compile as compile_fx  # whose import takes seconds
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())  # without which Inductor does not keep its code
    with mode:
        inputs: list[Any] = [
            torch.empty_strided(size, stride, dtype=dtype, device=on) for size, stride, dtype, on in shapes
        ]
    with torch.no_grad(), tracing(TracingContext(mode)):
        compiled: Callable[..., Any] = compile_fx(graph, inputs)
    return compiled


def _shapes(tensors: Sequence[Tensor]) -> list[_Shape]:
    return [(tuple(each.shape), each.stride(), each.dtype, each.device) for each in tensors]


def _without_constants(graph: GraphModule) -> tuple[GraphModule, list[Tensor]]:
    """A copy of a graph with its constants as further inputs, since code with constants is not found again."""
    new, of = Graph(), {}
    nodes = list(graph.graph.nodes)
    for node in nodes:
        if node.op == "placeholder":
            of[node] = new.placeholder(node.name)
    reads = [node for node in nodes if node.op == "get_attr"]
    constants = {name: new.placeholder(name) for name in dict.fromkeys(str(node.target) for node in reads)}
    of |= {node: constants[str(node.target)] for node in reads}
    for node in nodes:
        if node.op == "output":
            new.output((of[node.args[0]],))
        elif node not in of:
            of[node] = new.node_copy(node, of.__getitem__)
    return GraphModule({}, new), [getattr(graph, name) for name in constants]


class _Ref(int):
    """The number of a node among those of its graph."""


class _GraphFunction(str):
    """The name of a function in `torch.ops`, which itself cannot be pickled."""

    __slots__ = ()


def _nodes(graph: GraphModule) -> list[tuple[Any, ...]]:
    """The nodes of a graph to be pickled; torch pickles the code of a graph, of which factories then run only once."""
    numbers = {node: _Ref(number) for number, node in enumerate(graph.graph.nodes)}
    return [
        (
            node.op,
            _GraphFunction(node.target) if isinstance(node.target, torch._ops.OpOverload) else node.target,
            *map_arg((node.args, node.kwargs), numbers.__getitem__),
            node.name,
        )
        for node in graph.graph.nodes
    ]


def _graph(nodes: Sequence[tuple[Any, ...]]) -> GraphModule:
    """The graph of `_nodes`."""
    graph, made = Graph(), list[Node]()
    for op, target, args, kwargs, name in nodes:
        if isinstance(target, _GraphFunction):
            target = attrgetter(target)(torch.ops)
        args, kwargs = pytree.tree_map_only(_Ref, made.__getitem__, (args, kwargs))
        made.append(graph.create_node(op, target, args, kwargs, name))
    return GraphModule({}, graph)


def _end_with(parent: int) -> None:
    end = time.monotonic() + MAX_SECONDS
    while os.getppid() == parent and time.monotonic() < end:
        time.sleep(1)
    os._exit(1)


def serve(lock: int, parent: int) -> None:
    """Compile what `compile_ahead` has written to the standard input of this process."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.nice(NICENESS)
    from torch._inductor import config

    nodes, shapes, threads, (settings, precision, of_inductor) = pickle.load(sys.stdin.buffer)
    process_settings.apply(settings)
    if torch.backends.cuda.matmul.fp32_precision != precision:  # the other process has set the default, which is noted
        torch.set_float32_matmul_precision(torch.get_float32_matmul_precision())
    torch.set_num_threads(threads)
    config.load_config(of_inductor)
    if (device := shapes[0][-1]).type == "cuda":
        torch.cuda.set_device(device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler warns about itself
        _compiled(_graph(nodes), shapes)
    os.write(lock, COMPILED)


def _distance(tensors: Sequence[Tensor], others: Sequence[Tensor], which: Collection[int] = (0,)) -> float:
    """The Euclidean distance of some tensors; infinite or NaN where elements are that in only one of both."""
    return sqrt(sum(float(_apart(tensors[i], others[i]).square().sum()) for i in which))


def _change(tensors: Sequence[Tensor], before: Sequence[Tensor] | None, which: Collection[int]) -> float:
    """The same over elements with a finite difference; without `before`, from zero."""
    apart = (_apart(tensors[i], torch.zeros_like(tensors[i]) if before is None else before[i]) for i in which)
    return sqrt(sum(float(each.nan_to_num(0.0, 0.0, 0.0).square().sum()) for each in apart))


def _apart(a: Tensor, b: Tensor) -> Tensor:
    a, b = (torch.view_as_real(each.resolve_conj()) if each.is_complex() else each for each in (a, b))
    a, b = a.double(), b.double()
    return torch.where((a == b) | (a.isnan() & b.isnan()), 0.0, a - b)


def _has_half(graph: GraphModule, example: Sequence[Tensor]) -> bool:
    """Whether a graph computes in half precision."""
    if any(tensor.dtype in _HALF for tensor in example):
        return True
    return any(leaf in _HALF for node in graph.graph.nodes for leaf in pytree.tree_leaves((node.args, node.kwargs)))


class Float32Interpreter(Interpreter):
    """Runs a graph with float32 in place of half precision, except for functions that exist in half precision only."""

    def run_node(self, n: Node) -> Any:
        """Run one node of the graph."""
        if n.op == "call_function" and any(name in str(n.target) for name in _IN_HALF_ONLY):
            args, kwargs = map_arg((n.args, n.kwargs), self._narrowed)
            return pytree.tree_map_only(Tensor, _widened, super().call_function(n.target, args, kwargs))
        return super().run_node(n)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Read a constant of the graph."""
        value = super().get_attr(target, args, kwargs)
        return _widened(value) if isinstance(value, Tensor) else value

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call a function with float32 in place of the dtypes among its arguments."""
        if target in _IN_FLOAT:
            args = (*args[:-1], False)
        args, kwargs = pytree.tree_map_only(torch.dtype, lambda d: torch.float32 if d in _HALF else d, (args, kwargs))
        return super().call_function(target, args, kwargs)

    def _narrowed(self, n: Node) -> Any:
        """The value of a node, in the dtype that it has in the graph."""
        value, traced = self.env[n], n.meta.get("val")
        return value.to(traced.dtype) if isinstance(value, Tensor) and isinstance(traced, Tensor) else value


def _widened(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in _HALF else tensor
