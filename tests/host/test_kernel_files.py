"""Names in the kernel's files may have any bytes, and closed standard streams leave their numbers to other files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.host.file_system import kernel_lines

CODE = """
import mmap, os, pathlib
from shoal.host.machine import openmp_libraries
from shoal.run.caller_fork import prepare_fork

name = b"caf\\xe9.bin"
pathlib.Path(os.fsdecode(name)).write_bytes(bytes(4096))
with open(name, "rb") as file:
    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
pathlib.Path("/proc/self/comm").write_bytes(bytes.fromhex("d18dd0bad181d0"))  # cut within a letter
assert openmp_libraries() == []
print(prepare_fork())
"""

STREAMS = """
import os, sys
from shoal.host.processes import open_standard_streams

os.close(int(sys.argv[1]))
open_standard_streams()
assert os.path.samestat(os.fstat(int(sys.argv[1])), os.stat(os.devnull))
file = os.open(".", os.O_RDONLY)
print(file, os.get_inheritable(int(sys.argv[1])), file=open("said", "w"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc")
@pytest.mark.parametrize("locale", [{}, {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}], ids=["UTF-8", "ASCII"])
def test_names_with_any_bytes(locale: dict[str, str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=tmp_path, env={**os.environ, **locale}, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr) == ("None\n", "")


def test_only_a_newline_ends_a_line(tmp_path: Path) -> None:
    lines = [b"caf\xe9 \r\x0c", "\x85\u2028".encode(), b"", b"last"]
    (tmp_path / "maps").write_bytes(b"\n".join(lines) + b"\n")
    assert list(map(os.fsencode, kernel_lines(tmp_path / "maps"))) == lines


@pytest.mark.parametrize("number", [0, 1, 2])
def test_no_file_gets_the_number_of_a_closed_stream(number: int, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", STREAMS, str(number)], cwd=tmp_path, check=True)
    assert (tmp_path / "said").read_text() == "3 True\n"
