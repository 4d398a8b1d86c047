"""One forward pass where two are asked for: by the loss and by the metrics of a validation batch."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shoal.fuse.stacked import Stacked

__all__ = ["memoized"]

_Kept = list[tuple[Any, int]]
"""Objects, and how often each had been changed in place; they are kept alive, so that no other takes their place."""


@contextmanager
def memoized(model: nn.Module) -> Iterator[None]:
    """Within, a model called again with the very same inputs returns the same outputs without computing them again.

    For evaluation without gradients. Inputs or outputs that were changed in place since then do not count.
    """
    own = vars(model).get("forward")
    forward = model.forward
    calls: list[tuple[_Kept, _Kept, Any]] = []

    def once(*args: Any, **kwargs: Any) -> Any:
        given = _kept((args, kwargs))
        for inputs, outputs, result in calls:
            if _same(inputs, given) and _same(outputs, _kept(result)):
                return result
        result = forward(*args, **kwargs)
        calls.append((given, _kept(result), result))
        return result

    model.forward = once
    try:
        yield
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own


def _kept(tree: Any) -> _Kept:
    return [(leaf, _changes(leaf)) for leaf in pytree.tree_leaves(tree)]


def _changes(leaf: Any) -> int:
    data = leaf.whole if isinstance(leaf, Stacked) else leaf
    return data._version if isinstance(data, Tensor) else 0


def _same(before: _Kept, now: _Kept) -> bool:
    return len(before) == len(now) and all(a is b and m == n for (a, m), (b, n) in zip(before, now, strict=True))
