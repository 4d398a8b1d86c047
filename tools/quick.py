"""Each benchmark once with --quick: that it runs. They are children of one process, which has imported torch and Shoal.

    python tools/quick.py fusion searches   prints a line for each, and of one that fails all its output
    python tools/quick.py --measurements  those of tools/gpu.py at toy size on a CPU; each has to print its result
    python tools/quick.py --experiments   those of tools/experiments.py at toy size, likewise

The last line has the CPU seconds of all, in user and in system mode; the exit status is 1 if one of them failed.
"""

import argparse
import atexit
import gc
import os
import runpy
import shutil
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NoReturn

from experiments import measurements_of
from gpu import environment_of_measurements
from gpu_measurements import MEASUREMENTS
from session import figures_of

__all__ = ["main"]

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
LARGE = ("torch.utils.data", "torch._dynamo", "sklearn.datasets", "shoal.cli.app")
"""Imported once for all; with the first come numpy and the rest of torch."""
OF_MEASUREMENTS = (
    "hypothesis", "peft", "torch.profiler", "transformers.models.bert.modeling_bert",
    "transformers.models.llama.modeling_llama",
)  # fmt: skip


def main() -> int:
    """Run the benchmarks that are named, or the measurements."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="*", help="of files in benchmarks/, without .py")
    parser.add_argument("--measurements", action="store_true", help="those of tools/gpu.py at toy size as well")
    parser.add_argument("--experiments", action="store_true", help="those of tools/experiments.py at toy size as well")
    options = parser.parse_args()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that begins this in the background ignores it
    commands: dict[str, Sequence[str]] = {name: (str(BENCHMARKS / f"{name}.py"), "--quick") for name in options.names}
    folder = tempfile.mkdtemp()  # a `TemporaryDirectory` would be removed by each child
    try:
        if options.measurements:
            commands |= {each.name: each.quick for each in MEASUREMENTS}
            os.environ |= environment_of_measurements(Path(folder))[0] | {"CUDA_VISIBLE_DEVICES": ""}
        if options.experiments:
            commands |= {each.name: each.quick for each in measurements_of() if not each.missing()}
        _import((*LARGE, *(OF_MEASUREMENTS if options.measurements else ())))
        failed = [name for name, command in commands.items() if not _runs(name, command, name not in options.names)]
    finally:
        shutil.rmtree(folder)
    print(f"{_spent():.1f} CPU seconds; failed: {', '.join(failed) or 'none'}")
    return 1 if failed else 0


def _import(names: Sequence[str]) -> None:
    """Import what most children do, and leave it out of their collections: they share its memory."""
    for name in names:
        __import__(name)
    import shoal

    for name in shoal.__all__:
        getattr(shoal, name)
    gc.freeze()


def _runs(name: str, command: Sequence[str], measures: bool) -> bool:
    """Whether a script ends as it should: with status 0; or, if it measures, with figures, and 1 if some are missed."""
    before = _spent()
    with tempfile.TemporaryFile() as output:
        if (child := os.fork()) == 0:
            _run(command, output)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(f"{name:20} {_spent() - before:6.1f} CPU seconds", flush=True)
        output.seek(0)
        said = output.read().decode(errors="replace")
    good = status in (0, 1) and figures_of(said) is not None if measures else status == 0
    if not good:
        print(said, f"{name} ended with status {status}", sep="", flush=True)
    return good


def _spent() -> float:
    """CPU seconds of this process and of those that it has waited for."""
    return sum(os.times()[:4])


def _run(command: Sequence[str], output: IO[bytes]) -> NoReturn:
    """Be `python` with a script and its arguments in this child."""
    for number in (1, 2):
        os.dup2(output.fileno(), number)
    os.chdir(ROOT)
    sys.argv[:] = command
    sys.path[0] = str(Path(command[0]).absolute().parent)
    status = 0
    try:
        runpy.run_path(command[0], run_name="__main__")
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
