"""What may happen to a study, and doing it to a running one."""

import os
import random
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import invented_machine as machine
import psutil
from chaos_run import Run
from chaos_task import SHORTAGE

from shoal.core.device import Device
from shoal.run.mps import COMMAND
from shoal.run.nodes.link import LEASE_SECONDS

LOST_SECONDS = (0.5, 6.0)
"""For how long; the devices are looked at every three seconds."""

WHOLE_NODE = 0.3
"""How often all devices of a node are lost at once."""

SETTLED_SECONDS = 1.5
"""A job that has run for so long takes steps; one that prepares may be silent ten times as long."""


class Faults:
    """Does faults to a run, which are methods; each returns whether there was anything to do it to.

    Args:
        draw: decides whom they strike.
    """

    def __init__(self, draw: random.Random) -> None:
        self.draw = draw

    def turn(self) -> None:
        """See to what ends by itself."""

    def engine_killed(self, run: Run) -> bool:
        return self._send(signal.SIGKILL, [psutil.Process(run.process.pid)])

    def server_killed(self, run: Run) -> bool:
        with suppress(psutil.NoSuchProcess):
            return self._send(signal.SIGKILL, psutil.Process(run.process.pid).children()[:1])
        return False

    def worker_killed(self, run: Run) -> bool:
        return self._send(signal.SIGKILL, list(run.workers().values()))

    def program_killed(self, run: Run) -> bool:
        """The process of a function or command itself."""
        with suppress(psutil.NoSuchProcess):
            return self._send(signal.SIGKILL, [each for worker in run.workers().values() for each in worker.children()])
        return False

    def _send(self, number: int, processes: list[psutil.Process]) -> bool:
        """Send a signal to one of these processes."""
        with suppress(psutil.NoSuchProcess):
            sound = [x for x in processes if x.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)]
            if sound:
                self.draw.choice(sound).send_signal(number)
                return True
        return False


class GpuFaults(Faults):
    """Does faults to a run on the invented machine."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__(draw)
        self._lost: dict[str, float] = {}  # UUID -> when it comes back

    def turn(self) -> None:
        """Let what was lost come back when it is time."""
        now = time.monotonic()
        left = {uuid: until for uuid, until in self._lost.items() if until > now}
        if left != self._lost:
            self._lose(left)

    def worker_hangs(self, run: Run) -> bool:
        old = {job for job, running in run.jobs().items() if running.started < time.time() - SETTLED_SECONDS}
        return self._send(signal.SIGSTOP, [each for job, each in run.workers().items() if job in old])

    def memory_runs_out(self, run: Run) -> bool:
        """The next job to ask for memory finds none."""
        file = Path(os.environ[SHORTAGE])
        file.touch()
        deadline = time.monotonic() + 2.0
        while file.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        with suppress(FileNotFoundError):
            file.unlink()
            return False  # no job has asked
        return True

    def device_lost(self, run: Run) -> bool:
        present = [device for device in _busy(run) if device.uuid not in self._lost]
        if not present:
            return False
        (device,) = gone = [self.draw.choice(present)]
        if self.draw.random() < WHOLE_NODE:
            gone = next(list(node.devices) for node in machine.CLUSTER.nodes if device in node.devices)
        until = time.monotonic() + self.draw.uniform(*LOST_SECONDS)
        self._lose(self._lost | {each.uuid: until for each in gone})
        return True

    def _lose(self, lost: dict[str, float]) -> None:
        self._lost = lost
        machine.suffer(dict.fromkeys(lost, "NVMLError_GpuIsLost"))

    def mps_dies(self, run: Run) -> bool:
        return self._send(signal.SIGKILL, [process for device in _busy(run) for process in _mps(device)])


def _busy(run: Run) -> list[Device]:
    """Devices with a training job, in order."""
    names = {job.device for job in run.jobs().values()}
    return [device for _, device in machine.CLUSTER if device.name in names]


def _mps(device: Device) -> Iterator[psutil.Process]:
    """The daemon of a device and its server, where it has clients."""
    with suppress(FileNotFoundError, ValueError, psutil.NoSuchProcess):
        daemon = psutil.Process(int((machine.pipe(device) / f"{COMMAND}.pid").read_text()))
        if servers := daemon.children():
            yield from (daemon, *servers)


class NodeFaults(Faults):
    """Does faults to a run on a Ray cluster.

    Args:
        draw: decides whom they strike.
        cluster: of the run, started by this process.
    """

    def __init__(self, draw: random.Random, cluster: Any) -> None:
        super().__init__(draw)
        self._cluster = cluster

    def agent_killed(self, run: Run) -> bool:
        below = psutil.Process().children(recursive=True)
        return self._send(signal.SIGKILL, [each for each in below if "ray::RayAgent" in _line(each)])

    def node_killed(self, run: Run) -> bool:
        """Another one of its name comes at once."""
        node = self.draw.choice(sorted(self._cluster.worker_nodes, key=lambda node: node.node_id))
        self._cluster.remove_node(node, allow_graceful=False)
        self._cluster.add_node(num_cpus=1, node_name=node._ray_params.node_name)
        return True

    def engine_frozen(self, run: Run) -> bool:
        """For longer than the lease of the agents, which then end their jobs."""
        run.process.send_signal(signal.SIGSTOP)
        time.sleep(LEASE_SECONDS + 5.0)
        run.process.send_signal(signal.SIGCONT)
        return True


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
