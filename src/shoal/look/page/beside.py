"""The page beside a study that this process runs: a process of its own, which imports what a server needs."""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from shoal.core.errors import ShoalError

__all__ = ["beside_study", "check_page"]

_log = logging.getLogger("shoal.look.page")


def check_page() -> None:
    """Refuse to show a page that could not be served, because a package is missing."""
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise ShoalError("the page needs starlette and uvicorn. Install them with: pip install starlette uvicorn")


@contextmanager
def beside_study(directory: Path, wanted: bool) -> Iterator[None]:
    """Serve the page of a study, if wanted, in a process of its own while the context lasts, and print its address."""
    if not wanted:
        yield
        return
    path = [entry or os.getcwd() for entry in sys.path]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "shoal.look.page.server", str(directory), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path)},
        start_new_session=True,  # a Ctrl-C is for the engine
    )
    assert process.stdin is not None
    assert process.stdout is not None
    with process.stdout:
        address = process.stdout.readline().strip()
        if address:
            with suppress(OSError):  # nobody reads it
                print(f"shoal: the page is at {address}", file=sys.stderr, flush=True)
        else:
            _log.warning("the page cannot be served (exit status %s); the study continues without it", process.wait())
        try:
            yield
        finally:
            with suppress(BrokenPipeError), process.stdin:
                process.stdin.write("\n")  # a closed pipe is not enough: a fork of this process may hold it, too
            try:
                process.wait(10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
