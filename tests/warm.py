"""Programs run by a process that has imported torch and Shoal: to import both takes longer than most programs do then.

The process is started by `Warm`; run as a program, this file is that process: each line of its input is a request, each
line of its output an exit status.
"""

import atexit
import gc
import json
import os
import runpy
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["Warm"]

OUTPUT, ERRORS = "printed.txt", "errors.txt"


class Warm:
    """A process that has imported what programs need; close it after use.

    Args:
        options: of Python, such as "-W error".
    """

    def __init__(self, *options: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *options, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def script(self, path: Path, arguments: Sequence[object], directory: Path) -> tuple[int, str, str]:
        """Run a script in the process itself, so that it has the imports and its study the server of the one before.

        Args:
            path: of the script.
            arguments: of the script.
            directory: the working directory.

        Returns:
            The exit status, and what was printed to the two outputs.
        """
        return self._ask(directory, script=[str(path), *map(str, arguments)])

    def shoal(self, arguments: Sequence[object], directory: Path) -> subprocess.CompletedProcess[str]:
        """Run a command of `shoal` in a child.

        Args:
            arguments: of the command.
            directory: the working directory.

        Returns:
            The exit status, below 0 for a signal, and what was printed.
        """
        command = list(map(str, arguments))
        return subprocess.CompletedProcess(
            command, *self._ask(directory, command=command, environment=dict(os.environ))
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        with self._process:
            print(file=self._process.stdin, flush=True)  # loader processes of a test may hold the pipe open

    def _ask(self, directory: Path, **request: object) -> tuple[int, str, str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps({"directory": str(directory), **request}), file=self._process.stdin, flush=True)
        status = int(self._process.stdout.readline())
        files = [directory / name for name in (OUTPUT, ERRORS)]
        printed = [file.read_text() for file in files]
        for file in files:
            file.unlink()
        return status, *printed


def serve() -> None:
    """Answer one request after another, until an empty line."""
    answers = os.fdopen(os.dup(1), "w")
    home = sys.path[0]
    for line in sys.stdin:
        if line.isspace():
            return
        request = json.loads(line)
        if "script" in request:
            answer = _script(home, **request)
        elif (child := os.fork()) == 0:
            _command(**request)
        else:
            answer = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(answer, file=answers, flush=True)


def _enter(directory: str) -> None:
    """Go to a working directory, and print to files there."""
    os.chdir(directory)
    for number, name in (1, OUTPUT), (2, ERRORS):
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)


def _script(home: str, *, directory: str, script: list[str]) -> int:
    _enter(directory)
    sys.argv[:] = script
    sys.path[0] = home  # modules are found where they were, as a server needs
    try:
        runpy.run_path(script[0], run_name="__main__")
    except BaseException as error:
        traceback.print_exc()
        return error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return 0


def _command(*, directory: str, command: list[str], environment: Mapping[str, str]) -> Any:
    """Be `shoal` in this child."""
    _enter(directory)
    os.environ.clear()
    os.environ.update(environment)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.argv[:] = ["shoal", *command]
    sys.path[0] = ""
    from shoal.__main__ import main

    try:
        status = main()
    except SystemExit as error:
        if isinstance(error.code, str):
            raise
        status = error.code
    threading._shutdown()  # the end of a process, less the half second in which Python visits all objects of torch
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    import shoal
    import shoal.cli.app

    for name in shoal.__all__:
        getattr(shoal, name)
    gc.freeze()  # children share what is here, as long as no collection touches it
    serve()
