"""All rules: torch function -> how it runs for all members.

A rule is called with the function and the user's own arguments, stacked or plain, and returns the result for all
members, or NotImplemented for arguments it does not cover; those go to vmap.
"""

from collections.abc import Callable
from typing import Any

from shoal.fuse.rules import (
    attention,
    axes,
    conv,
    dropout,
    elementwise,
    embedding,
    gradient,
    index,
    linear,
    loss,
    meta,
    norm,
    pooling,
    shape,
)

__all__ = ["RULES"]

RULES: dict[Any, Callable[..., Any]] = {
    **elementwise.RULES,
    **meta.RULES,
    **gradient.RULES,
    **axes.RULES,
    **shape.RULES,
    **index.RULES,
    **linear.RULES,
    **conv.RULES,
    **norm.RULES,
    **embedding.RULES,
    **pooling.RULES,
    **dropout.RULES,
    **attention.RULES,
    **loss.RULES,
}
