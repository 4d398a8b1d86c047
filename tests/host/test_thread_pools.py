"""Numbers of threads of native libraries that are loaded already."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import ctypes, numpy, shutil, sys, torch
from pathlib import Path
from shoal.host.machine import limit_threads, openblas_libraries, openmp_libraries

def check(count):
    limit_threads(count)
    found = {torch.get_num_threads()}
    found |= {ctypes.CDLL(path).omp_get_max_threads() for path in openmp_libraries()}
    for library in map(ctypes.CDLL, openblas_libraries()):
        names = [f"{prefix}openblas_get_num_threads{suffix}" for prefix in ("", "scipy_") for suffix in ("", "64_")]
        found |= {getattr(library, name)() for name in names if hasattr(library, name)}
    assert found == {count}, found

known = set(openmp_libraries())
assert known
check(3)
assert (numpy.ones((300, 300)) @ numpy.ones((300, 300))).sum() == 300**3
copy = Path(shutil.copy(min(known), Path(sys.argv[1]) / "libgomp-copy.so.1"))
ctypes.CDLL(str(copy))
assert set(openmp_libraries()) == {*known, str(copy)}
copy.unlink()
assert set(openmp_libraries()) == known
check(2)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the libraries of a process are listed in /proc")
def test_all_libraries_get_the_number_but_one_that_was_deleted_since(tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
