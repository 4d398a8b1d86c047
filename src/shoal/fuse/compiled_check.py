"""Compares a compiled step with the graph that it was compiled from, since compilers have faults.

In half precision both are far from each other: each rounds every result, and a compiler rounds fewer of them. So both
are compared with the same graph in float32.
"""

from collections.abc import Callable, Collection, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Interpreter, Node
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree

from shoal.core.errors import FusionError

__all__ = ["Float32Interpreter", "check_compiled"]

_HALF = (torch.bfloat16, torch.float16)
_IN_HALF_ONLY = ("flash_attention", "cudnn_attention")
"""Parts of the names of functions that a GPU computes in half precision only."""
_IN_FLOAT = {torch.ops.aten._softmax.default, torch.ops.aten._log_softmax.default}
"""Functions whose last argument says that they widen a half tensor."""


def check_compiled(
    graph: GraphModule,
    compiled: Callable[..., Tensor],
    example: Sequence[Tensor],
    compared: Collection[int],
    copied: Callable[[Sequence[Tensor]], list[Tensor]],
) -> None:
    """Run both on copies of the same inputs, and compare the losses and some of the inputs, which a step changes.

    In float32 and float64 the two may differ by a part of the change. In half precision the compiled step may be
    further by this part from the step in float32 than twice the distance of the graph.

    Args:
        graph: The step as a graph of plain tensor functions; it returns the losses, [B].
        compiled: The compiled step.
        example: Inputs of a step.
        compared: Indices of the inputs that are compared.
        copied: Copies the inputs that the step may change; the others both read.

    Raises:
        FusionError: They compute different values.
    """
    expected, got = copied(example), copied(example)
    losses, found = graph(*expected), compiled(*got)
    tolerance = 1e-9 if losses.dtype == torch.float64 else 1e-2
    if _has_half(graph, example):
        true = [_widened(tensor) for tensor in copied(example)]
        with torch.autocast(example[0].device.type, enabled=False):
            true_losses = Float32Interpreter(graph).run(*true)
        allowed = 2 * _distance(expected, true, compared) + tolerance * _distance(true, example, compared)
        same = _distance(got, true, compared) <= allowed
        allowed = 2 * _distance([losses], [true_losses]) + tolerance * float(true_losses.double().norm())
        same = same and _distance([found], [true_losses]) <= allowed
    else:
        same = _distance(got, expected, compared) <= tolerance * _distance(expected, example, compared)
        same = same and torch.allclose(losses, found, rtol=tolerance, atol=0, equal_nan=True)
    if not same:
        raise FusionError("the compiled step and the trace compute different values; this is a compiler fault")


def _distance(tensors: Sequence[Tensor], others: Sequence[Tensor], which: Collection[int] = (0,)) -> float:
    return sqrt(sum(float((tensors[i].double() - others[i].double()).square().sum()) for i in which))


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
