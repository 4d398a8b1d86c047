"""All rules, and those that users add."""

from typing import Any

from shoal.fuse.rules import (
    attention,
    axes,
    channelwise,
    conv,
    dropout,
    elementwise,
    embedding,
    gradient,
    linear,
    loss,
    meta,
    norm,
    recurrent,
    shape,
)
from shoal.fuse.rules.base import Rule

__all__ = ["FAMILIES", "RULES", "register_rule"]

FAMILIES: dict[str, tuple[Rule, ...]] = {
    "elementwise": elementwise.RULES,
    "meta": meta.RULES,
    "gradient": gradient.RULES,
    "axes": axes.RULES,
    "shape": shape.RULES,
    "linear": linear.RULES,
    "conv": conv.RULES,
    "norm": norm.RULES,
    "embedding": embedding.RULES,
    "channelwise": channelwise.RULES,
    "dropout": dropout.RULES,
    "attention": attention.RULES,
    "recurrent": recurrent.RULES,
    "loss": loss.RULES,
}
"""By the name of their file."""

RULES: dict[Any, Rule] = {
    function: rule for family in FAMILIES.values() for rule in family for function in rule.functions
}
"""By function."""


def register_rule(rule: Rule) -> None:
    """Run functions by a rule, in this process, from now on; it takes the place of any other rule of theirs.

    Register it in the module that defines the functions: the workers of a search import that module as well.

    Args:
        rule: that `shoal.testing.check_rule` has found to give what members have alone.
    """
    RULES.update(dict.fromkeys(rule.functions, rule))
