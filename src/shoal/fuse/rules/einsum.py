"""Einstein sums: one more letter, for the members, in every stacked operand and in the result."""

from collections import Counter
from string import ascii_letters
from typing import Any

import torch

from shoal.fuse.stacked import Stacked

__all__ = ["RULES"]


def _einsum(func: Any, equation: Any, *operands: Any) -> Any:
    if not isinstance(equation, str):
        return NotImplemented
    tensors = operands[0] if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    given, arrow, result = equation.replace(" ", "").partition("->")
    terms = given.split(",")
    letter = next((c for c in ascii_letters if c not in equation), None)
    if letter is None or len(terms) != len(tensors):
        return NotImplemented
    if not arrow:
        result = _implied(given)
    own = [letter + term if isinstance(x, Stacked) else term for term, x in zip(terms, tensors, strict=True)]
    data = [x.whole if isinstance(x, Stacked) else x for x in tensors]
    return Stacked(torch.einsum(f"{','.join(own)}->{letter}{result}", *data))


def _implied(given: str) -> str:
    """The result where an equation names none: axes of an ellipsis, then letters that occur once, in order."""
    counts = Counter(c for c in given if c.isalpha())
    return ("..." if "..." in given else "") + "".join(sorted(c for c, n in counts.items() if n == 1))


RULES: dict[Any, Any] = {torch.einsum: _einsum}
