"""All rules: torch function -> how it runs for all members.

A rule is called with the function and the user's own arguments, stacked or plain, and returns the result for all
members, or NotImplemented for arguments it does not cover; those go to vmap.
"""

from collections.abc import Callable
from typing import Any

from shoal.fuse.rules import (
    activation,
    attention,
    axes,
    classes,
    conv,
    ctc,
    dropout,
    einsum,
    elementwise,
    embedding,
    gather,
    gradient,
    index,
    layer_norm,
    linear,
    loss,
    memory,
    meta,
    norm,
    planes,
    pooling,
    recurrent,
    resize,
    shape,
    similarity,
)

__all__ = ["RULES"]

RULES: dict[Any, Callable[..., Any]] = {
    **elementwise.RULES,
    **meta.RULES,
    **memory.RULES,
    **resize.RULES,
    **gradient.RULES,
    **axes.RULES,
    **shape.RULES,
    **index.RULES,
    **gather.RULES,
    **einsum.RULES,
    **linear.RULES,
    **conv.RULES,
    **norm.RULES,
    **layer_norm.RULES,
    **activation.RULES,
    **embedding.RULES,
    **planes.RULES,
    **pooling.RULES,
    **similarity.RULES,
    **dropout.RULES,
    **attention.RULES,
    **recurrent.RULES,
    **loss.RULES,
    **classes.RULES,
    **ctc.RULES,
}
