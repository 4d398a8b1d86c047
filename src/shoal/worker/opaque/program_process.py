"""Starts and ends the process of a program."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import BinaryIO

import psutil

from shoal.cluster.machine import threads
from shoal.cluster.processes import catches, driver_files, kill, process_tree
from shoal.core.device import Device
from shoal.core.trial import Trial
from shoal.opaque import Command, Function, Opaque
from shoal.worker.opaque.main import main_of_fork

__all__ = ["ProgramProcess", "program_environment", "visible_device"]

_BOOTSTRAP = (
    "import pickle, sys; sys.path[:], sys.argv[:] = pickle.load(sys.stdin.buffer); "
    "from shoal.worker.opaque.main import main; main()"
)
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def program_environment(trial: Trial, device: Device, address: str, directory: Path, step: int) -> dict[str, str]:
    """Return the environment variables for a program that sees this device only, at the checkpoint of a step."""
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

    In a worker of the fork server without an open GPU driver, a function runs in a fork, so modules are not imported
    again. Such a worker runs no user code, and no threads but those of its connection, which hold no lock that the fork
    takes. Else a function runs in a new process.
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
        self.inherited_memory = 0
        self._process: subprocess.Popen[bytes] | BaseProcess
        if isinstance(training, Command):
            self._process = subprocess.Popen(
                training.line(trial, directory),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=log,
                cwd=training.directory,
                env=environment,
            )
        elif _may_fork(log):
            memory = psutil.Process().memory_info()
            self.inherited_memory = memory.rss - memory.shared
            fork = multiprocessing.get_context("fork")
            self._process = fork.Process(
                target=main_of_fork, args=(training.content, dict(trial.config), environment), name="MainProcess"
            )
            self._process.start()
        else:
            self._process = _new_process(training, trial, environment, output, log)
        assert self._process.pid is not None
        self.pid = self._process.pid
        self._tree: list[psutil.Process] = []

    def status(self) -> int | None:
        """Return the exit status as in `subprocess`; None while the program runs."""
        return self._process.exitcode if isinstance(self._process, BaseProcess) else self._process.poll()

    def tree(self) -> list[psutil.Process]:
        """Return the processes of the program; once it has ended, those of the last call before."""
        if self.status() is None:  # else its id may belong to another process
            self._tree = process_tree(self.pid) or self._tree
        return self._tree

    def request_end(self) -> bool:
        """Send SIGUSR1 to the first process if all of the program's handle it; return whether it was sent.

        A wrapper would pass it on to a process without a handler, which it would kill. Forked processes have inherited
        the handler. Under Slurm nothing is sent: handlers such as Lightning's requeue the whole Slurm job.
        """
        tree = self.tree()
        if "SLURM_JOB_ID" in os.environ or not tree or not all(catches(x.pid, signal.SIGUSR1) for x in tree):
            return False
        os.kill(self.pid, signal.SIGUSR1)
        return True

    def terminate(self) -> None:
        """Send SIGTERM to the program."""
        self.tree()
        self._process.terminate()

    def kill_all(self) -> None:
        """Kill all processes of the program."""
        tree = self.tree()
        self._process.kill()
        if isinstance(self._process, BaseProcess):
            self._process.join()
        else:
            self._process.wait()
        kill(tree)


def _may_fork(log: BinaryIO) -> bool:
    """Return whether this process is a worker, which alone has its output in the log of its job, without a driver."""
    return sys.platform == "linux" and os.path.sameopenfile(1, log.fileno()) and not driver_files()


def _new_process(
    function: Function, trial: Trial, environment: Mapping[str, str], output: BinaryIO, log: BinaryIO
) -> subprocess.Popen[bytes]:
    """Start a new process for a function."""
    with tempfile.TemporaryFile() as setup:
        paths: Sequence[str] = [entry or os.getcwd() for entry in sys.path]
        pickle.dump((paths, sys.argv), setup)
        pickle.dump((function.content, dict(trial.config)), setup)
        setup.seek(0)
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOTSTRAP], stdin=setup, stdout=output, stderr=log, env=environment
        )
