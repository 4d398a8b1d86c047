"""What may happen to a study on the invented machine, and doing it to a running one."""

import os
import random
import signal
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import psutil
from chaos import Run

from invented import machine, task
from shoal.core.device import Device
from shoal.core.errors import JournalError
from shoal.core.job import Purpose
from shoal.core.trial import TrialState
from shoal.journal.view import JournalView
from shoal.run.mps import COMMAND

__all__ = ["Fault", "Faults", "LiveRun", "left_behind"]

LOST_SECONDS = (0.5, 6.0)
"""For how long; the devices are looked at every three seconds."""

WHOLE_NODE = 0.3
"""How often all devices of a node are lost at once."""

SETTLED_SECONDS = 1.5
"""A job that has run for so long takes steps; one that prepares may be silent ten times as long."""


@dataclass(frozen=True)
class Fault:
    """One that happened.

    Args:
        kind: a key of `Faults.kinds`.
        study: directory of the one that it happened to.
        jobs: ids of the training jobs that it struck.
        trials: numbers of those that they trained then.
    """

    kind: str
    study: Path
    jobs: frozenset[str]
    trials: frozenset[int]


@dataclass(frozen=True)
class _Running:
    """A training job that runs now.

    Args:
        device: its name.
        trials: numbers of those that it trains.
        seconds: since it was started.
    """

    device: str
    trials: frozenset[int]
    seconds: float


class LiveRun(Run):
    """A run whose processes can be told apart."""

    def workers(self) -> dict[str, psutil.Process]:
        """Id of each training job that has a process now -> that."""
        jobs, found = self.jobs(), {}
        for each in self._below():
            with suppress(OSError):  # gone, or not a worker so far
                job = Path(os.readlink(f"/proc/{each.pid}/fd/1")).stem  # its log
                if job in jobs:
                    found[job] = each
        return found

    def jobs(self) -> dict[str, _Running]:
        """The training jobs that run now, by id."""
        with suppress(JournalError), JournalView.read(self.directory) as journal:
            rows = [row for row in journal.trials() if row.state is TrialState.RUNNING]
            return {
                job.id: _Running(
                    job.device, frozenset(row.number for row in rows if row.job == job.id), time.time() - job.started
                )
                for job in journal.jobs(running=True)
                if job.purpose is Purpose.TRAIN and job.started > self.began  # else a killed engine has left it so
            }
        return {}

    def reports(self) -> int:
        """Epochs that trials have reported."""
        with suppress(JournalError), JournalView.read(self.directory) as journal:
            return sum(row.epoch for row in journal.trials())
        return 0

    def _below(self) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(self.process.pid).children(recursive=True)
        return []


@dataclass
class Faults:
    """Does faults to a run, and sees to what ends by itself.

    Args:
        draw: decides whom they strike.
        happened: so far.
    """

    draw: random.Random
    happened: list[Fault] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._lost: dict[str, float] = {}  # UUID -> when it comes back
        self._hurt: dict[str, psutil.Process] = {}

    def strike(self, kind: str, run: LiveRun) -> bool:
        """Do one of `kinds` to a run; whether there was anything to do it to."""
        jobs = run.jobs()
        struck = self.kinds[kind](self, run)
        if struck is None:
            return False
        jobs = run.jobs() | jobs  # one may have begun since
        trials = frozenset(number for job in struck & jobs.keys() for number in jobs[job].trials)
        self.happened.append(Fault(kind, run.directory, struck, trials))
        return True

    def turn(self) -> None:
        """Let what was lost come back when it is time."""
        now = time.monotonic()
        back = [uuid for uuid, until in self._lost.items() if until <= now]
        for uuid in back:
            del self._lost[uuid]
        if back:
            self._suffer()

    def _worker_is_killed(self, run: LiveRun) -> frozenset[str] | None:
        return self._signal(run, signal.SIGKILL)

    def _worker_hangs(self, run: LiveRun) -> frozenset[str] | None:
        return self._signal(run, signal.SIGSTOP, SETTLED_SECONDS)

    def _signal(self, run: LiveRun, number: int, least_seconds: float = 0.0) -> frozenset[str] | None:
        old = {job for job, running in run.jobs().items() if running.seconds >= least_seconds}
        workers = {job: each for job, each in run.workers().items() if job in old and _is_sound(each)}
        if not workers:
            return None
        job = self.draw.choice(sorted(workers))
        with suppress(psutil.NoSuchProcess):
            workers[job].send_signal(number)
            return frozenset({job})
        return None

    def _memory_runs_out(self, run: LiveRun) -> frozenset[str] | None:
        """Whoever asks next for memory finds none; who that was is known when it has been found."""
        file = Path(os.environ[task.SHORTAGE])
        file.touch()
        deadline = time.monotonic() + 2.0
        while file.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        with suppress(FileNotFoundError):
            file.unlink()
            return None  # nobody has asked
        (told,) = file.parent.glob(f"{file.name}-*")
        told.unlink()
        return frozenset({told.name.removeprefix(f"{file.name}-")})

    def _device_is_lost(self, run: LiveRun) -> frozenset[str] | None:
        present = [device for device in _busy(run) if device.uuid not in self._lost]
        if not present:
            return None
        (device,) = gone = [self.draw.choice(present)]
        if self.draw.random() < WHOLE_NODE:
            gone = next(list(node.devices) for node in machine.CLUSTER.nodes if device in node.devices)
        struck = _on(run, gone)
        self._lost |= dict.fromkeys((x.uuid for x in gone), time.monotonic() + self.draw.uniform(*LOST_SECONDS))
        self._suffer()
        return struck

    def _suffer(self) -> None:
        machine.suffer(dict.fromkeys(self._lost, "NVMLError_GpuIsLost"))

    def _mps_dies(self, run: LiveRun) -> frozenset[str] | None:
        processes = [(device, process) for device in _busy(run) for process in _mps(device)]
        if not processes:
            return None
        device, process = self.draw.choice(processes)
        struck = _on(run, [device])
        with suppress(psutil.NoSuchProcess):
            process.kill()
            return struck
        return None

    def _engine_is_killed(self, run: LiveRun) -> frozenset[str] | None:
        struck = frozenset(run.jobs())
        run.kill("engine")
        return struck

    kinds: ClassVar[dict[str, Callable[[Any, LiveRun], frozenset[str] | None]]] = {
        "worker killed": _worker_is_killed,
        "worker hangs": _worker_hangs,
        "out of memory": _memory_runs_out,
        "device lost": _device_is_lost,
        "MPS dies": _mps_dies,
        "engine killed": _engine_is_killed,
    }
    """By name; each says which training jobs it struck, or None if there was nothing to strike."""


def _is_sound(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    return False


def _busy(run: LiveRun) -> list[Device]:
    """Devices with a training job, in order."""
    names = {job.device for job in run.jobs().values()}
    return [device for _, device in machine.CLUSTER if device.name in names]


def _on(run: LiveRun, devices: Collection[Device]) -> frozenset[str]:
    names = {device.name for device in devices}
    return frozenset(name for name, job in run.jobs().items() if job.device in names)


def _mps(device: Device) -> Iterator[psutil.Process]:
    """The daemon of a device and its server, where it has clients."""
    with suppress(FileNotFoundError, ValueError, psutil.NoSuchProcess):
        daemon = psutil.Process(int((machine.pipe(device) / f"{COMMAND}.pid").read_text()))
        if servers := daemon.children():
            yield from (daemon, *servers)


def left_behind(place: Path, seconds: float) -> list[str]:
    """Processes that still have to do with a directory after some seconds in which they may end."""
    deadline = time.monotonic() + seconds
    while (found := [text for each in psutil.process_iter() if (text := _tie(each, place))]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.1)
    return found


def _tie(process: psutil.Process, place: Path) -> str:
    """What a process has to do with a directory: it runs a program of there, or has a file of there open."""
    with suppress(psutil.NoSuchProcess, psutil.AccessDenied, OSError):
        words = process.cmdline()
        links = [os.readlink(entry) for entry in Path(f"/proc/{process.pid}/fd").iterdir()]
        if process.pid != os.getpid() and any(text.startswith(str(place)) for text in (*words, *links)):
            return f"{process.pid} {' '.join(words)[:100]}"
    return ""
