"""Scripts run as `python -W error SCRIPT` runs them, in children forked from one process that has torch and Shoal.

To import both takes longer than what most scripts of the documentation do then. The process is started by `Warm`; run
as a program, this file is that process: each line of its input is a script to be run, each line of its output an exit
status.
"""

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

__all__ = ["Warm"]


class Warm:
    """A process that has imported what scripts need, and forks a child for each of them; close it after use."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-W", "error", __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, script: Path, directory: Path, environment: Mapping[str, str]) -> tuple[int, str]:
        """Run a script in a directory.

        Args:
            script: its path.
            directory: the working directory; what the script prints is kept there in `printed.txt`.
            environment: variables that are set beside those that this process has.

        Returns:
            The exit status, below 0 for a signal, and all that was printed.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = [str(script), str(directory), dict(environment)]
        print(json.dumps(request), file=self._process.stdin, flush=True)
        status = self._process.stdout.readline()
        return int(status), (directory / "printed.txt").read_text()

    def close(self) -> None:
        self._process.communicate()


def serve() -> str:
    """Answer one request after another; returns in the children alone, with the script that they are to run."""
    answers = os.fdopen(os.dup(1), "w")
    for line in sys.stdin:
        script, directory, environment = json.loads(line)
        child = os.fork()
        if child == 0:
            answers.close()
            os.chdir(directory)
            os.environ.update(environment)
            printed = os.open("printed.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            for number, file in ((0, os.open(os.devnull, os.O_RDONLY)), (1, printed), (2, printed)):
                os.dup2(file, number)
            return script
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), file=answers, flush=True)
    sys.exit()


if __name__ == "__main__":
    import shoal

    for name in shoal.__all__:
        getattr(shoal, name)
    sys.argv[:] = [serve()]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
