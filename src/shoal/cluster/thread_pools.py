"""Thread pools of the native libraries that this process has loaded, on Linux."""

import ctypes
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

__all__ = ["limit_threads", "openblas_libraries", "openmp_libraries"]

_OPENMP = re.compile(r"/lib(g|i)?omp[^/]*\.so[^/]*$")
_OPENBLAS = re.compile(r"openblas[^/]*\.so[^/]*$")
_OPENBLAS_SETTERS = [f"{prefix}openblas_set_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_")]


def limit_threads(count: int) -> None:
    """Set the number of threads of torch, OpenMP and OpenBLAS, as their environment variables do at their import."""
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(count)
    for path in openmp_libraries():
        with suppress(OSError, AttributeError):  # replaced on disk since, or a tool of OpenMP without the function
            ctypes.CDLL(path).omp_set_num_threads(count)
    for path in openblas_libraries():
        with suppress(OSError):
            library = ctypes.CDLL(path)
            for name in _OPENBLAS_SETTERS:
                if hasattr(library, name):
                    getattr(library, name)(count)


def openmp_libraries() -> list[str]:
    """Return the paths of the loaded libraries of OpenMP."""
    return [*filter(_OPENMP.search, _libraries())]


def openblas_libraries() -> list[str]:
    """Return the paths of the loaded libraries of OpenBLAS."""
    return [*filter(_OPENBLAS.search, _libraries())]


def _libraries() -> set[str]:
    columns = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return {line[5] for line in columns if len(line) == 6 and ".so" in line[5]}
