"""Which functions of stacked tensors found no rule."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shoal.fuse import dispatch


@contextmanager
def without_rule() -> Iterator[Counter[str]]:
    """Within, counts the functions that run by vmap ("vmap: outer") or in a loop ("loop: nonzero")."""
    found: Counter[str] = Counter()
    vmap, loop = dispatch._vmap, dispatch.loop

    def by_vmap(func: Any, *args: Any) -> Any:
        result = vmap(func, *args)
        found[f"vmap: {dispatch._name(func)}"] += 1
        return result

    def by_loop(func: Any, *args: Any, **kwargs: Any) -> Any:
        found[f"loop: {dispatch._name(func)}"] += 1
        return loop(func, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "_vmap", by_vmap)
        patch.setattr(dispatch, "loop", by_loop)
        yield found
