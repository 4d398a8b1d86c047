"""Starts and ends the process of a program."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import psutil

from shoal.cluster.machine import threads
from shoal.cluster.processes import catches, kill, process_tree
from shoal.core.device import Device
from shoal.core.trial import Trial
from shoal.opaque import Command, Opaque

__all__ = ["ProgramProcess", "program_environment", "visible_device"]

_BOOTSTRAP = (
    "import pickle, sys; sys.path[:], sys.argv[:] = pickle.load(sys.stdin.buffer); "
    "from shoal.worker.opaque.main import main; main()"
)
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def program_environment(trial: Trial, device: Device, address: str, directory: Path, step: int) -> dict[str, str]:
    """Return the environment variables for a program.

    Args:
        trial: Trial to train.
        device: Only device that the program sees; its cores set the number of threads.
        address: Path of the socket for reports.
        directory: Directory of the program's checkpoint.
        step: Number of the report after which this checkpoint was written.
    """
    return {
        **os.environ,
        **dict.fromkeys(_THREADS, str(threads(device.cores))),
        "CUDA_VISIBLE_DEVICES": visible_device(device),
        "PYTHONUNBUFFERED": "1",  # else lines of output are buffered
        "SHOAL_REPORT": address,
        "SHOAL_CHECKPOINT": str(directory),
        "SHOAL_STEP": str(step),
        "SHOAL_TRIAL": str(trial.number),
        "SHOAL_SEED": str(trial.seed),
    }


def visible_device(device: Device) -> str:
    """Return `CUDA_VISIBLE_DEVICES` for a program that may use only this device; "" for a slot of the CPU."""
    if not device.is_cuda:
        return ""
    if device.uuid:
        return device.uuid
    index = int(device.name.removeprefix("cuda:"))
    mine = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(index) if mine is None else mine.split(",")[index].strip()


class ProgramProcess:
    """Running program, with the processes that it starts.

    Args:
        training: Function or command to run.
        trial: Trial to train.
        environment: Environment variables; see `program_environment`.
        output: File for standard output.
        log: File for standard error.
        directory: Directory of the trial.
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
        """Return the exit status as in `subprocess`; None while the program runs."""
        return self._process.poll()

    def tree(self) -> list[psutil.Process]:
        """Return the processes of the program; once it has ended, those of the last call before."""
        if self._process.poll() is None:  # else its id may belong to another process
            self._tree = process_tree(self.pid) or self._tree
        return self._tree

    def request_end(self) -> bool:
        """Send SIGUSR1 to the first process of the program if all its processes handle it; return whether it was sent.

        A wrapper would pass it on to a process without a handler, which would be killed by it. Forked processes have
        inherited the handler, and with it a copy of the state that it would save. Under Slurm nothing is sent, since
        handlers of SIGUSR1, such as Lightning's, requeue the whole Slurm job.
        """
        tree = self.tree()
        if "SLURM_JOB_ID" in os.environ or not tree or not all(catches(x.pid, signal.SIGUSR1) for x in tree):
            return False
        self._process.send_signal(signal.SIGUSR1)
        return True

    def terminate(self) -> None:
        """Send SIGTERM to the program."""
        self.tree()
        self._process.terminate()

    def kill_all(self) -> None:
        """Kill all processes of the program."""
        tree = self.tree()
        self._process.kill()
        self._process.wait()
        kill(tree)
