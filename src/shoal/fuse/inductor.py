"""Compiles the graph of a step by Inductor, in this process, or before that in one beside it.

Inductor finds its own code again by the graph, its inputs and its settings. So a process beside this one compiles for a
minute while steps go on, and this process then compiles the same graph in the seconds that reading the code takes.
Neither needs the tensors, only their shapes, and no process traces Python code again as `torch.compile` does.
"""

import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg
from torch.utils._pytree import tree_map_only

from shoal.fuse.compile_cache import COMPILED

__all__ = ["compile_ahead", "compile_graph", "serve"]

NICENESS = 10
"""Of a compiler beside this process, which leaves cores to those that train."""

_Shape = tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device]
"""Size, stride, dtype and device of a tensor."""

_compilers: list[subprocess.Popen[bytes]] = []
"""Compilers beside this process that had not ended when the last one was started."""


def compile_graph(graph: GraphModule, example: Sequence[Tensor]) -> Callable[..., Tensor]:
    """Compile a graph of plain tensor functions that returns a tensor; `example` are its inputs."""
    plain, constants = _without_constants(graph)
    compiled = _compiled(plain, _shapes([*example, *constants]))
    return lambda *tensors: compiled(*tensors, *constants)[0]


def compile_ahead(graph: GraphModule, example: Sequence[Tensor], lock: int) -> None:
    """Let a process beside this one compile a graph, such that `compile_graph` finds the code.

    It has the right to compile the step until it ends, and ends with this process.

    Args:
        graph: As for `compile_graph`.
        example: As for `compile_graph`.
        lock: `CompileRecord.lock`.

    Raises:
        Exception: The graph cannot be given to another process, for any reason that `pickle` has.
    """
    from torch._inductor import config  # whose import takes seconds

    plain, constants = _without_constants(graph)
    settings = config.save_config_portable(), torch.get_float32_matmul_precision()
    job = _nodes(plain), _shapes([*example, *constants]), torch.get_num_threads(), settings
    with tempfile.TemporaryFile() as file:
        pickle.dump(job, file)
        file.seek(0)
        _compilers[:] = [each for each in _compilers if each.poll() is None]
        command = f"from shoal.fuse.inductor import serve; serve({lock}, {os.getpid()})"
        program = [sys.executable, "-P", "-c", command]
        _compilers.append(subprocess.Popen(program, stdin=file, stdout=subprocess.DEVNULL, pass_fds=[lock]))


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
    held = [node for node in nodes if node.op == "get_attr"]
    for node in [*(node for node in nodes if node.op == "placeholder"), *held]:
        of[node] = new.placeholder(node.name)
    for node in nodes:
        if node.op == "output":
            new.output((of[node.args[0]],))
        elif node not in of:
            of[node] = new.node_copy(node, of.__getitem__)
    return GraphModule({}, new), [getattr(graph, str(node.target)) for node in held]


class _Ref(int):
    """The number of a node among those of its graph."""


class _Function(str):
    """The name of a function in `torch.ops`, which itself cannot be pickled."""

    __slots__ = ()


def _nodes(graph: GraphModule) -> list[tuple[Any, ...]]:
    """The nodes of a graph to be pickled; torch pickles the code of a graph, of which factories then run only once."""
    numbers = {node: _Ref(number) for number, node in enumerate(graph.graph.nodes)}
    return [
        (
            node.op,
            _Function(node.target) if isinstance(node.target, torch._ops.OpOverload) else node.target,
            *map_arg((node.args, node.kwargs), numbers.__getitem__),
            node.name,
        )
        for node in graph.graph.nodes
    ]


def _graph(nodes: Sequence[tuple[Any, ...]]) -> GraphModule:
    """The graph of `_nodes`."""
    graph, made = Graph(), list[Node]()
    for op, target, args, kwargs, name in nodes:
        if isinstance(target, _Function):
            target = attrgetter(target)(torch.ops)
        args, kwargs = tree_map_only(_Ref, made.__getitem__, (args, kwargs))
        made.append(graph.create_node(op, target, args, kwargs, name))
    return GraphModule({}, graph)


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def serve(lock: int, parent: int) -> None:
    """Compile what `compile_ahead` has written to the standard input of this process."""
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    os.nice(NICENESS)
    from torch._inductor import config

    nodes, shapes, threads, (settings, precision) = pickle.load(sys.stdin.buffer)
    torch.set_num_threads(threads)
    if precision != torch.get_float32_matmul_precision():  # setting it is noted in the key of the code
        torch.set_float32_matmul_precision(precision)
    config.load_config(settings)
    try:
        _compiled(_graph(nodes), shapes)
    finally:
        os.write(lock, COMPILED)  # also after an error, which the other process then finds itself
