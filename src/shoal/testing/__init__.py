"""Conformance suites for algorithms, policies, packings, back ends, callbacks and fusion rules."""

from typing import TYPE_CHECKING, Any

from shoal.testing.algorithms import check_algorithm
from shoal.testing.backends import check_backend
from shoal.testing.callbacks import check_callback
from shoal.testing.packings import check_packing
from shoal.testing.policies import check_policy

if TYPE_CHECKING:
    from shoal.testing.rules import check_rule

__all__ = ["check_algorithm", "check_backend", "check_callback", "check_packing", "check_policy", "check_rule"]


def __getattr__(name: str) -> Any:
    """Import the suite of fusion rules when it is first used: the others need no torch."""
    if name != "check_rule":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from shoal.testing.rules import check_rule

    return check_rule
