"""A user's file, run as `python FILE` would run it."""

import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from shoal.paths import absolute, here

__all__ = ["run_script"]


def run_script(file: Path, arguments: Sequence[str]) -> None:
    """Run a file as `__main__`; it is the last thing this process does.

    It finds `sys.argv[1:]`, `sys.path[0]` and `__file__` as under `python FILE ARGUMENTS`, and an exception that leaves
    it is shown as there: the traceback begins in the file, not in what runs it.

    Args:
        file: to run.
        arguments: what it finds in `sys.argv[1:]`.
    """
    here()  # where it is gone, an import of torch ends the process, and says something else
    path = str(absolute(file))
    sys.argv[1:] = arguments
    sys.path[0] = str(file.resolve().parent)

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        while trace is not None and trace.tb_frame.f_code.co_filename != path:
            trace = trace.tb_next
        traceback.print_exception(kind, error, trace)

    sys.excepthook = show
    runpy.run_path(path, run_name="__main__")
