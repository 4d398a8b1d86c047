"""Numbers of threads of native libraries that are loaded already."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import ctypes, numpy, torch
from shoal.cluster.machine import limit_threads, openblas_libraries, openmp_libraries
limit_threads(3)
found = {torch.get_num_threads()}
found |= {ctypes.CDLL(path).omp_get_max_threads() for path in openmp_libraries()}
for library in map(ctypes.CDLL, openblas_libraries()):
    names = [f"{prefix}openblas_get_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_")]
    found |= {getattr(library, name)() for name in names if hasattr(library, name)}
assert openmp_libraries()
assert found == {3}, found
assert (numpy.ones((300, 300)) @ numpy.ones((300, 300))).sum() == 300**3
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the libraries of a process are listed in /proc")
def test_all_libraries_get_the_number() -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run([sys.executable, "-c", CODE], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


REPLACED = """
import ctypes, shutil, sys, torch
from pathlib import Path
from shoal.cluster.machine import limit_threads, openmp_libraries
known = set(openmp_libraries())
copy = Path(shutil.copy(min(known), Path(sys.argv[1]) / "libgomp-copy.so.1"))
ctypes.CDLL(str(copy))
assert set(openmp_libraries()) == {*known, str(copy)}
copy.unlink()
assert set(openmp_libraries()) == known
limit_threads(3)
assert torch.get_num_threads() == 3
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the libraries of a process are listed in /proc")
def test_a_library_that_was_deleted_since_is_left_out(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", REPLACED, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
