"""The process of a program of the user's: how it is started and ended."""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import psutil

from shoal.cluster.machine import threads
from shoal.cluster.processes import family, kill
from shoal.core.device import Device
from shoal.core.trial import Trial
from shoal.opaque import Command, Opaque

__all__ = ["ProgramProcess", "surroundings", "visible_device"]

_BOOTSTRAP = (
    "import pickle, sys; sys.path[:], sys.argv[:] = pickle.load(sys.stdin.buffer); "
    "from shoal.worker.opaque.main import main; main()"
)
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def surroundings(trial: Trial, device: Device, address: str, directory: Path, step: int) -> dict[str, str]:
    """The environment of a program.

    Args:
        trial: which it trains.
        device: where: the only one it sees, with so many threads as `threads` says.
        address: of the socket that it reports to.
        directory: that it keeps what it goes on from in.
        step: reports that the contents of that have behind them.
    """
    return {
        **os.environ,
        **dict.fromkeys(_THREADS, str(threads(device.cores))),
        "CUDA_VISIBLE_DEVICES": visible_device(device),
        "PYTHONUNBUFFERED": "1",  # else a line of output comes when there are many
        "SHOAL_REPORT": address,
        "SHOAL_CHECKPOINT": str(directory),
        "SHOAL_STEP": str(step),
        "SHOAL_TRIAL": str(trial.number),
        "SHOAL_SEED": str(trial.seed),
    }


def visible_device(device: Device) -> str:
    """What `CUDA_VISIBLE_DEVICES` is to be for a program that may use this device alone; "" of a slot of the CPU."""
    if not device.is_cuda:
        return ""
    if device.uuid:
        return device.uuid
    index = int(device.name.removeprefix("cuda:"))
    mine = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(index) if mine is None else mine.split(",")[index].strip()


class ProgramProcess:
    """A running program, and the processes that it starts.

    Args:
        training: what to run.
        trial: for which.
        environment: see `surroundings`.
        output: the file that gets its standard output.
        log: the file that gets what it writes to standard error.
        directory: the trial's own.
    """

    def __init__(
        self,
        training: Opaque,
        trial: Trial,
        environment: Mapping[str, str],
        output: BinaryIO,
        log: BinaryIO,
        directory: Path,
    ) -> None:
        if isinstance(training, Command):
            self._process = subprocess.Popen(
                training.line(trial, directory),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                cwd=training.directory,
                env=environment,
            )
        else:
            with tempfile.TemporaryFile() as setup:
                paths: Sequence[str] = [entry or os.getcwd() for entry in sys.path]
                pickle.dump((paths, sys.argv), setup)
                pickle.dump((training.content, dict(trial.config)), setup)
                setup.seek(0)
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-c", _BOOTSTRAP], stdin=setup, stdout=output, stderr=log, env=environment
                )
        self.pid = self._process.pid
        self._tree: list[psutil.Process] = []

    def status(self) -> int | None:
        """How it ended, as in `subprocess`; None while it runs."""
        return self._process.poll()

    def tree(self) -> list[psutil.Process]:
        """Its processes; when it has ended, those that there were at the last look."""
        if self._process.poll() is None:  # else its id may be another's by now
            self._tree = family(self.pid) or self._tree
        return self._tree

    def terminate(self) -> None:
        """Ask it to end."""
        self.tree()
        self._process.terminate()

    def clear(self) -> None:
        """Kill what there still is of it."""
        tree = self.tree()
        self._process.kill()
        self._process.wait()
        kill(tree)
