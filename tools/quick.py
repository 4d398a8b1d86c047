"""Each benchmark once with --quick: that it runs. They are children of one process, which has imported torch and Shoal.

    python tools/quick.py fusion lora     prints a line for each, and of one that fails all its output

The last line has the CPU seconds of all, in user and in system mode; the exit status is 1 if one of them failed.
"""

import argparse
import atexit
import gc
import os
import runpy
import signal
import sys
import tempfile
import threading
import traceback
from pathlib import Path
from typing import IO, NoReturn

__all__ = ["main"]

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
LARGE = ("torch.utils.data", "torch._dynamo", "sklearn.datasets", "shoal.cli.app")
"""Imported once for all; with the first come numpy and the rest of torch."""


def main() -> int:
    """Run the benchmarks that are named."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="+", help="of files in benchmarks/, without .py")
    names = parser.parse_args().names
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that begins this in the background ignores it
    _import()
    failed = []
    for name in names:
        before = _spent()
        with tempfile.TemporaryFile() as output:
            if (child := os.fork()) == 0:
                _run(name, output)
            status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            print(f"{name:20} {_spent() - before:6.1f} CPU seconds", flush=True)
            if status:
                output.seek(0)
                print(output.read().decode(errors="replace"), f"{name} ended with status {status}", sep="", flush=True)
                failed.append(name)
    print(f"{_spent():.1f} CPU seconds; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _import() -> None:
    """Import what most benchmarks do, and leave it out of the collections of children: they share its memory."""
    for name in LARGE:
        __import__(name)
    import shoal

    for name in shoal.__all__:
        getattr(shoal, name)
    gc.freeze()


def _spent() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def _run(name: str, output: IO[bytes]) -> NoReturn:
    """Be `python benchmarks/NAME.py --quick` in this child."""
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    path = BENCHMARKS / f"{name}.py"
    sys.argv[:] = [str(path), "--quick"]
    sys.path[0] = str(BENCHMARKS)
    status = 0
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1 if error.code else 0
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]  # the end of a process, less the visit of all that torch made
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    sys.exit(main())
