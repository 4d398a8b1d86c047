"""What a user gives, as bytes for the journal and for other processes, and what these bytes are in this one."""

import functools
import hashlib
import inspect
import io
import pickle
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import cloudpickle

from shoal.core.errors import ShoalError

__all__ = ["dumped", "loaded", "recalled", "remember", "why_not_loaded"]

_given: dict[bytes, object] = {}
"""Digest of the bytes -> the object that this process pickled to them. Objects stay alive as long as the process."""


def dumped(value: object, what: str, fault: type[ShoalError], remedy: str) -> bytes:
    """Pickle what a user gave.

    Args:
        value: that.
        what: what it is and for whom, as in "the task cannot be pickled for its workers".
        fault: raised where that cannot be done.
        remedy: what its user is to do then.

    Raises:
        ShoalError: a `fault`; it cannot be pickled.
    """
    try:
        content: bytes = cloudpickle.dumps(value)
    except (TypeError, pickle.PicklingError) as error:
        raise fault(f"{what} ({_culprit(value)}{error}); {remedy}") from error
    return content


def remember(content: bytes, value: object) -> None:
    """Let `recalled` find the object that this process has pickled to these bytes."""
    _given[_digest(content)] = value


def recalled(content: bytes) -> Any:
    """The very object that was pickled, where this process did so and it has not changed since; else as `loaded`.

    The caller of `tune` may so use classes, globals and breakpoints of its own in what runs in its process. Whether an
    object has changed (an attribute, a class or a function of `__main__`, a global that these read) is seen from its
    bytes: what was recorded counts.
    """
    value = _given.get(_digest(content))
    return value if value is not None and _is_pickled_to(value, content) else loaded(content)


def loaded(content: bytes) -> Any:
    """A new object of these bytes, whose classes are its own where they were pickled by value.

    cloudpickle would give a class of `__main__` that is in this process already, or that came out of other bytes, the
    methods that these bytes hold.

    Raises:
        Exception: whatever the modules raise that the object needs.
    """
    return _Unpickler(io.BytesIO(content)).load()


def why_not_loaded(error: BaseException) -> str:
    """In a line, what `loaded` raised, and the remedy."""
    if isinstance(error, (ImportError, AttributeError)):
        return f"{error}; define it in a module on sys.path or in the script itself"
    return f"{type(error).__name__}: {error}; correct its module"


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module, name = _RENAMED.get((module, name), (_MOVED.get(module, module), name))
        found = super().find_class(module, name)
        return _untracked(found) if (module, name) in _MAKERS else found


_MOVED = {
    **{f"shoal.{name}": f"shoal.core.{name}" for name in ("domain", "errors", "objective", "space", "trial")},
    "shoal.cluster.device": "shoal.core.device",
    "shoal.cost.demand": "shoal.core.demand",
    "shoal.study": "shoal.results",
    "shoal.fuse.batch": "shoal.fuse.api",
    "shoal.fuse.clip": "shoal.fuse.grads",
    "shoal.planner.carrying_out": "shoal.planner.feasibility",
    "shoal.planner.limit": "shoal.planner.resource_limit",
    "shoal.planner.promises": "shoal.planner.reservations",
    "shoal.planner.room": "shoal.planner.free_resources",
    "shoal.planner.turn": "shoal.planner.planning_context",
    "shoal.planner.packing.improve": "shoal.planner.packing.local_search",
    "shoal.planner.packing.row": "shoal.planner.packing.candidate_order",
    "shoal.planner.packing.single": "shoal.planner.packing.no_packing",
    "shoal.schedule.layout": "shoal.schedule.device_strips",
    "shoal.schedule.outlook": "shoal.schedule.plan_estimate",
    "shoal.schedule.packing": "shoal.schedule.bin_packing",
    "shoal.schedule.promise": "shoal.schedule.expected_finish",
    "shoal.schedule.sharing": "shoal.schedule.space_sharing",
    "shoal.schedule.shelf": "shoal.schedule.indexed_queue",
    "shoal.schedule.turns": "shoal.schedule.time_sharing",
}
"""Where what a journal has pickled is now: a script's tasks, algorithms, policies, and all they name."""

_RENAMED = {
    ("shoal.schedule.promise", "Promise"): ("shoal.schedule.expected_finish", "ExpectedFinish"),
    ("shoal.schedule.layout", "Layout"): ("shoal.schedule.device_strips", "DeviceStrips"),
    ("shoal.schedule.layout", "Place"): ("shoal.schedule.device_strips", "StripPlacement"),
    ("shoal.schedule.ledger", "Room"): ("shoal.schedule.ledger", "Capacity"),
    ("shoal.schedule.outlook", "Outlook"): ("shoal.schedule.plan_estimate", "PlanEstimate"),
    ("shoal.schedule.outlook", "outlook"): ("shoal.schedule.plan_estimate", "plan_estimate"),
    ("shoal.schedule.packing", "Packing"): ("shoal.schedule.bin_packing", "BinPacking"),
    ("shoal.schedule.packing", "Slot"): ("shoal.schedule.bin_packing", "DeviceBin"),
    ("shoal.schedule.shelf", "Shelf"): ("shoal.schedule.indexed_queue", "IndexedQueue"),
    ("shoal.planner.packing.base", "Scene"): ("shoal.planner.packing.base", "PackingContext"),
    ("shoal.planner.packing.random", "Random"): ("shoal.planner.packing.random", "RandomPacking"),
    ("shoal.planner.packing.single", "Single"): ("shoal.planner.packing.no_packing", "NoPacking"),
}
"""Likewise of policies and packings that are called otherwise now."""

_MAKERS = {("cloudpickle.cloudpickle", f"_make_skeleton_{kind}") for kind in ("class", "enum")}


def _untracked(make: Callable[..., type]) -> Callable[..., type]:
    """A maker of classes without the id by which cloudpickle finds one that it has made before."""

    def made(*arguments: Any) -> type:
        *others, _, extra = arguments
        return make(*others, None, extra)

    return made


def _is_pickled_to(value: object, content: bytes) -> bool:
    try:
        return bool(cloudpickle.dumps(value) == content)
    except (TypeError, pickle.PicklingError):  # it holds what it did not hold then
        return False


def _culprit(value: object) -> str:
    """What of a value cannot be pickled, as the beginning of a sentence; "" if that is not known."""
    for what, part in _parts(value):
        if not _can_be_pickled(part):
            lock = ", a functools.cached_property, which holds a lock before Python 3.12"
            return f"{what}{lock if isinstance(part, functools.cached_property) else ''}: "
    return ""


def _parts(value: object) -> Iterator[tuple[str, object]]:
    """What is pickled with a value, each with its name: attributes, those of its classes, what their functions use."""
    for name, part in getattr(value, "__dict__", {}).items():
        yield f"its attribute {name!r}", part
    functions = _functions(value)
    for kind in type(value).__mro__:
        if _can_be_pickled(kind):  # by its name, or as it is
            continue
        for name, part in vars(kind).items():
            if found := _functions(part):
                functions += found
            elif not (name.startswith("__") and name.endswith("__")):
                yield f"the attribute {name!r} of its class {kind.__qualname__}", part
    known: set[FunctionType] = set()
    while functions:
        if (function := functions.pop(0)) in known or _can_be_pickled(function):
            continue
        known.add(function)
        used = inspect.getclosurevars(function)
        for name, part in {**used.globals, **used.nonlocals}.items():
            if found := _functions(part):
                functions += found
            elif not isinstance(part, type):
                yield f"{name!r}, which {function.__qualname__} uses", part


def _functions(value: object) -> list[FunctionType]:
    """Those that a value is made of: itself, or those of a property, a method of a class or a static one."""
    if isinstance(value, property):
        return [part for part in (value.fget, value.fset, value.fdel) if isinstance(part, FunctionType)]
    inner = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
    return [inner] if isinstance(inner, FunctionType) else []


def _can_be_pickled(value: object) -> bool:
    try:
        cloudpickle.dumps(value)
    except Exception:  # whatever its own methods raise: what cannot be pickled has been said already
        return False
    return True


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content).digest()
