"""All rules: torch function -> how it runs for all members.

A rule is called with the function and the user's own arguments, stacked or plain, and returns the result for all
members, or NotImplemented for arguments it does not cover; those go to vmap.
"""

from collections.abc import Callable
from typing import Any

from shoal.fuse.rules import attention, conv, dropout, elementwise, embedding, linear, loss, meta, norm, pooling, shape

__all__ = ["RULES"]

RULES: dict[Any, Callable[..., Any]] = {
    **meta.RULES,
    **elementwise.RULES,
    **shape.RULES,
    **linear.RULES,
    **conv.RULES,
    **norm.RULES,
    **embedding.RULES,
    **pooling.RULES,
    **dropout.RULES,
    **attention.RULES,
    **loss.RULES,
}
