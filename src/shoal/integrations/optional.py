"""Packages that an integration needs and Shoal does not install, and the numbers among the values that they log."""

from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any

from shoal.core.errors import ShoalError, TaskError
from shoal.core.objective import metric_names

__all__ = ["check_installed", "numbers"]


def check_installed(package: str, user: str) -> None:
    """Check that a package is installed."""
    if find_spec(package) is None:
        raise ShoalError(f"{user} needs {package}, which is not installed. Install it with: pip install {package}")


def numbers(logged: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among logged values, at least one; tensors and arrays of one element are numbers, booleans not."""
    found = {}
    for name, value in logged.items():
        if not isinstance(value, (bool, str, bytes)):
            with suppress(TypeError, ValueError, RuntimeError):  # a list, or a tensor of several elements
                found[name] = float(value)
    if not found:
        raise TaskError(
            f"there is no number to report among the logged values, which are {metric_names(logged)}; log a metric in "
            "the validation"
        )
    return found
