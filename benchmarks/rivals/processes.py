"""Members divided among processes that run side by side."""

import multiprocessing
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from rivals.arrays import Chosen
from rivals.rival import Cell, Rival
from rivals.serial import Serial
from shoal.core.errors import MpsError
from shoal.run.mps import MpsDaemon

__all__ = ["Processes", "Slots"]

PATIENCE_SECONDS = 600.0
HEAVY = (
    "torch", "transformers.models.bert.modeling_bert", "peft", "transformers.models.llama.modeling_llama",
    "shoal.fuse.step",
)  # fmt: skip
"""Imported once, by the server that forks the processes; installed packages, as it knows no path but theirs."""


class Processes(Rival):
    """As many processes as cores, or members if they are fewer; each trains its members one after another.

    On a GPU they share it by CUDA MPS, and by time slices where MPS cannot be had.

    Args:
        cell: What to train.
        begin: How processes begin: "forkserver", or "fork" of this process, which then must have used no GPU.
    """

    name = "processes"

    def __init__(self, cell: Cell, begin: str = "forkserver") -> None:
        super().__init__(cell)
        count = min(cell.members, os.cpu_count() or 1)
        self._mps = _daemon(cell.device)
        environment = {} if self._mps is None else self._mps.environment()
        context: Any = multiprocessing.get_context(begin)
        context.set_forkserver_preload(list(HEAVY))
        self._connections: list[Connection] = []
        self._processes = []
        threads = max(1, cell.threads // count)
        for number in range(count):
            here, there = context.Pipe()
            part = replace(cell, threads=threads, which=range(number, cell.members, count))
            process = context.Process(target=_serve, args=(there, type(self), part, environment), daemon=True)
            process.start()
            there.close()
            self._connections.append(here)
            self._processes.append(process)
        self.run(0)

    @classmethod
    def begun(cls, cell: Cell) -> Rival:
        """Return what trains the members of one process."""
        return Serial(cell)

    def step(self) -> None:
        self.run(1)

    def run(self, steps: int) -> float:
        """All processes begin at once; the last to finish counts."""
        began = time.perf_counter()
        for connection in self._connections:
            connection.send(steps)
        self.elsewhere = sum(_answer(connection) for connection in self._connections)
        return time.perf_counter() - began

    def note(self) -> str:
        sharing = "" if self.cell.device.type != "cuda" else ", time slices" if self._mps is None else ", MPS"
        return f"{len(self._processes)} processes{sharing}"

    def close(self) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(5)
            if process.is_alive():
                process.kill()
        if self._mps is not None:
            self._mps.stop()


def _answer(connection: Connection) -> int:
    """Bytes that a process took on a GPU, once it has taken its steps."""
    if not connection.poll(PATIENCE_SECONDS):
        raise RuntimeError(f"a process has not answered in {PATIENCE_SECONDS:.0f} s")
    try:
        answer = connection.recv()
    except (EOFError, ConnectionResetError) as error:
        raise RuntimeError("a process has ended before its time") from error
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return int(answer)


def _daemon(device: torch.device) -> MpsDaemon | None:
    """The daemon of a GPU, started; None on a CPU, and where MPS cannot be had."""
    if device.type != "cuda":
        return None
    try:
        daemon = MpsDaemon(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        daemon.start()
    except MpsError as reason:
        warnings.warn(f"no MPS: {reason}", stacklevel=2)
        return None
    return daemon


class Slots(Processes):
    """As Shoal trains on the slots of a CPU: each process has an array of its members."""

    name = "Shoal on slots"

    @classmethod
    def begun(cls, cell: Cell) -> Rival:
        array = Chosen(cell, compiling=False)
        array.warm_up(0)
        return array


def _serve(connection: Connection, kind: type[Processes], cell: Cell, environment: Mapping[str, str]) -> None:
    """Take steps of some members as asked until the connection closes."""
    os.environ.update(environment)
    warnings.simplefilter("ignore")
    torch.set_num_threads(cell.threads)
    try:
        rival = kind.begun(cell)
        while True:
            rival.run(connection.recv())
            connection.send(torch.cuda.max_memory_allocated() if cell.device.type == "cuda" else 0)
    except (EOFError, BrokenPipeError):
        return
    except (RuntimeError, ValueError) as error:
        connection.send(f"{type(error).__name__}: {error}")
