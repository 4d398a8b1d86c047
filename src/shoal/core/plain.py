"""NumPy scalars as Python values, at the boundary to what users give. It imports no NumPy."""

import sys
from dataclasses import fields
from typing import Any

__all__ = ["plain", "plain_fields"]


def plain(value: Any) -> Any:
    """Return a scalar of NumPy as the int, float or bool that it is; any other value as it is."""
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.generic):
        for kind, convert in ((numpy.bool_, bool), (numpy.integer, int), (numpy.floating, float)):
            if isinstance(value, kind):
                return convert(value)
    return value


def plain_fields(instance: Any) -> None:
    """Replace scalars of NumPy in the fields of a new dataclass instance, also of a frozen one, and in tuples there."""
    for field in fields(instance):
        value = getattr(instance, field.name)
        converted = tuple(map(plain, value)) if type(value) is tuple else plain(value)
        if converted is not value:
            object.__setattr__(instance, field.name, converted)
