"""Settings of torch that hold for a whole process: those of the caller of `tune` hold in all processes of its study.

They are recorded with the study, so that a resume or a rerun in another process has them, too. Settings that have the
defaults of torch are left out, so a study mostly records none.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import reduce
from typing import Any

import psutil

from shoal.host.machine import ThisMachine, threads

__all__ = ["ProcessSettings", "applied", "apply", "current", "thread_limit", "unheld"]

ProcessSettings = Mapping[str, str | int | bool]
"""Name of a setting -> its value."""

_THREADS = "num_threads"

_FUNCTIONS: dict[str, tuple[str | int | bool, Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    "default_dtype": (
        "float32",
        lambda torch: str(torch.get_default_dtype()).removeprefix("torch."),
        lambda torch, value: torch.set_default_dtype(getattr(torch, value)),
    ),
    "deterministic_debug_mode": (
        0,
        lambda torch: torch.get_deterministic_debug_mode(),
        lambda torch, value: torch.set_deterministic_debug_mode(value),
    ),
    "detect_anomaly": (
        False,
        lambda torch: torch.is_anomaly_enabled(),
        lambda torch, value: torch.set_anomaly_enabled(value),
    ),
    "float32_matmul_precision": (
        "highest",
        lambda torch: torch.get_float32_matmul_precision(),
        lambda torch, value: torch.set_float32_matmul_precision(value),
    ),
}
"""Setting -> its default, and functions of torch that read it and set it. It is set before the attributes."""

_ATTRIBUTES: dict[str, str | bool] = {
    "backends.cudnn.deterministic": False,
    "backends.cudnn.benchmark": False,
    "backends.cudnn.allow_tf32": True,
    "backends.cuda.matmul.allow_tf32": False,
}
"""Attribute of torch -> its default."""

_PRECISIONS = {
    "backends.fp32_precision": "none",
    "backends.cuda.matmul.fp32_precision": "none",
    "backends.cudnn.conv.fp32_precision": "tf32",
    "backends.cudnn.rnn.fp32_precision": "tf32",
    "backends.mkldnn.matmul.fp32_precision": "none",
    "backends.mkldnn.conv.fp32_precision": "none",
}
"""Attributes of torch that take the place of `allow_tf32` and of `float32_matmul_precision`."""


def current() -> dict[str, str | int | bool]:
    """Return the settings of this process that are not the defaults; none if it has not imported torch."""
    torch: Any = sys.modules.get("torch")
    if torch is None:
        return {}
    found = {name: value for name, (default, value) in _readable(torch).items() if value != default}
    cores = min(threads(ThisMachine().cores()), psutil.cpu_count(logical=False) or sys.maxsize)
    if torch.get_num_threads() < cores:  # the caller has lowered it
        found[_THREADS] = torch.get_num_threads()
    return found


def _readable(torch: Any) -> dict[str, tuple[Any, Any]]:
    """Default and value of each setting, of the older or the newer ones for float32."""
    functions = {name: (default, read(torch)) for name, (default, read, _) in _FUNCTIONS.items() if name[0] == "d"}
    try:
        older = {name: (default, _read(torch, name)) for name, default in _ATTRIBUTES.items()}
        default, read, _ = _FUNCTIONS["float32_matmul_precision"]
        return functions | {"float32_matmul_precision": (default, read(torch))} | older
    except RuntimeError:  # the caller uses the newer ones, and torch refuses to read the older ones after that
        newer = {name: default for name, default in _ATTRIBUTES.items() if "tf32" not in name} | _PRECISIONS
        return functions | {name: (default, _read(torch, name)) for name, default in newer.items()}


def apply(settings: ProcessSettings) -> None:
    """Set the settings in this process, for good; the number of threads is that of each job (`thread_limit`)."""
    if not settings:
        return
    import torch  # the engine imports none

    for name, (_, _, write) in _FUNCTIONS.items():
        if name in settings:
            write(torch, settings[name])
    for name in settings.keys() - _FUNCTIONS.keys() - {_THREADS}:
        path, _, attribute = name.rpartition(".")
        setattr(_read(torch, path), attribute, settings[name])


@contextmanager
def applied(settings: ProcessSettings) -> Iterator[None]:
    """Within this context the settings hold in this process; afterwards, its own do again, and its threads."""
    own = current()
    _replace(own, settings)
    torch: Any = sys.modules.get("torch")
    count = 0 if torch is None else torch.get_num_threads()
    try:
        yield
    finally:
        _replace(current(), own)
        if count:
            torch.set_num_threads(count)


def _replace(before: ProcessSettings, after: ProcessSettings) -> None:
    defaults = {name: default for name, (default, _, _) in _FUNCTIONS.items()} | _ATTRIBUTES | _PRECISIONS
    changed = {name for name in {*before, *after} - {_THREADS} if before.get(name) != after.get(name)}
    apply({name: after.get(name, defaults[name]) for name in changed})


def thread_limit(settings: ProcessSettings) -> int:
    """Return the number of threads that the caller has set as the most of a job."""
    return int(settings.get(_THREADS, sys.maxsize))


def unheld(program: bool) -> str:
    """Return in words which settings of this process do not hold in workers, or ""; `program`: of a function's."""
    torch: Any = sys.modules.get("torch")
    names = sorted(current()) if program else []
    if torch is not None and torch.get_default_device().type != "cpu":
        names.append("default_device")
    if not names:
        return ""
    remedy = "set them in the function" if program else "a trial's model is moved to its own device"
    return f"torch's settings {', '.join(names)} of this process do not hold in workers; {remedy}"


def _read(torch: Any, path: str) -> Any:
    return reduce(getattr, path.split("."), torch)
