"""The first and the last line of a benchmark: the machine, and the figures with what they miss."""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

__all__ = ["machine", "report"]


def machine(*packages: str) -> str:
    """The processor, its cores, and the versions of Python and of packages."""
    versions = "".join(f", {package} {version(package)}" for package in packages)
    name = platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, Python {platform.python_version()}{versions}"


def report(figures: Mapping[str, Any], missed: Sequence[str]) -> int:
    """Print the figures as one JSON object, with what they miss; return the exit status."""
    print(json.dumps({**figures, "missed": missed}))
    return 1 if missed else 0
