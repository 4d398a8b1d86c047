"""Registry of the fusion rules: torch function -> rule, including rules that users register."""

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
    vocabulary,
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
    "vocabulary": vocabulary.RULES,
}

RULES: dict[Any, Rule] = {
    function: rule for family in FAMILIES.values() for rule in family for function in rule.functions
}


def register_rule(rule: Rule) -> None:
    """Register a rule for its functions in this process; the rule replaces any other rule of these functions.

    Call `register_rule` in the module that defines the functions, since the workers of a search import that module too.

    Args:
        rule: A rule that passes `shoal.testing.check_rule`.
    """
    RULES.update(dict.fromkeys(rule.functions, rule))
