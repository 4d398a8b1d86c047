"""Planning: fuse trials into arrays, pack arrays into jobs, and place jobs on devices by the policy.

Packings and policies are imported at their first use as attributes: `shoal.plan.schedule.POLICIES`.
"""

from importlib import import_module
from types import ModuleType

__all__ = ["packing", "schedule"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
