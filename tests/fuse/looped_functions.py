"""Records which functions of stacked tensors ran in a loop over the members."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from shoal.fuse import intercept


@contextmanager
def in_loops() -> Iterator[Counter[str]]:
    """Within, counts the functions that run in a loop, by neither a rule nor vmap."""
    found: Counter[str] = Counter()
    loop = intercept.loop

    def by_loop(func: Any, *args: Any, **kwargs: Any) -> Any:
        found[intercept._name(func)] += 1
        return loop(func, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(intercept, "loop", by_loop)
        yield found
