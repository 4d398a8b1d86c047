"""Thread pools of the native libraries that this process has loaded, on Linux."""

import ctypes
import re
import sys
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
    setters = [(path, ["omp_set_num_threads"]) for path in openmp_libraries()]  # a tool of OpenMP does not have it
    setters += [(path, _OPENBLAS_SETTERS) for path in openblas_libraries()]
    for path, names in setters:
        library = ctypes.CDLL(path)
        for name in names:
            if hasattr(library, name):
                getattr(library, name)(count)


def openmp_libraries() -> list[str]:
    """Return the paths of the loaded libraries of OpenMP."""
    return [*filter(_OPENMP.search, _libraries())]


def openblas_libraries() -> list[str]:
    """Return the paths of the loaded libraries of OpenBLAS."""
    return [*filter(_OPENBLAS.search, _libraries())]


def _libraries() -> set[str]:
    """Return the paths of all shared libraries, without those that were replaced on disk, which cannot be loaded."""
    columns = (line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines())
    return {line[5] for line in columns if len(line) == 6 and ".so" in line[5] and not line[5].endswith(" (deleted)")}
