"""Slurm clusters for tests: one of programs that stand for Slurm's, and a real one of three nodes on this machine."""

import getpass
import json
import os
import platform
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from shoal.run.nodes.slurm import Slurm

PROGRAMS = ("srun", "sbatch", "squeue", "scancel", "scontrol")


class FakeCluster:
    """The directory of fake_slurm.py."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def calls(self, program: str) -> list[list[str]]:
        """The arguments of each call of a program so far."""
        return [call["command"][1:] for call in self._calls() if call["command"][0] == program]

    def environments(self) -> list[list[str]]:
        """The names of Slurm's variables in each call."""
        return [call["environment"] for call in self._calls()]

    def jobs(self) -> dict[str, dict[str, Any]]:
        """Id of each batch job -> its state, node and process."""
        return {path.stem: json.loads(path.read_text()) for path in sorted(self.directory.glob("jobs/*.json"))}

    def set_down(self, *nodes: str) -> None:
        """Let these nodes take no step."""
        (self.directory / "down").write_text(" ".join(nodes))

    def _calls(self) -> list[dict[str, list[str]]]:
        path = self.directory / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@contextmanager
def fake_cluster(directory: Path, monkeypatch: pytest.MonkeyPatch, nodes: Sequence[str]) -> Iterator[FakeCluster]:
    """Programs that stand for Slurm's are first on PATH, and this process is in no allocation."""
    (directory / "jobs").mkdir(parents=True)
    (directory / "nodes").write_text(" ".join(nodes))
    (directory / "down").touch()
    source = Path(__file__).with_name("fake_slurm.py")
    for program in PROGRAMS:
        path = directory / "bin" / program
        path.parent.mkdir(exist_ok=True)
        path.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {source} {program} "$@"\n')
        path.chmod(0o755)
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{directory / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_SLURM", str(directory))
    made = FakeCluster(directory)
    yield made
    if left := [job for job, values in made.jobs().items() if values["state"] in ("PENDING", "RUNNING")]:
        subprocess.run([directory / "bin" / "scancel", *left], check=True)


@contextmanager
def end_ray() -> Iterator[None]:
    """End the Ray of this process, with the nodes of its allocation, and restore its variables in the environment."""
    before = dict(os.environ)
    try:
        yield
    finally:
        end_steps()
        if "ray" in sys.modules:
            sys.modules["ray"].shutdown()
        os.environ.clear()
        os.environ.update(before)


def end_steps() -> None:
    """End the nodes of the allocation."""
    for step in Slurm._steps.values():
        assert step._srun.stdin is not None
        with suppress(BrokenPipeError):
            step._srun.stdin.close()
    while Slurm._steps:
        Slurm._steps.popitem()[1]._srun.wait()


NODES = ("ash", "beech", "cedar")

_CONFIGURATION = """
ClusterName=shoal
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={directory}/munge.socket
CredType=cred/munge
StateSaveLocation={directory}/state
SlurmdSpoolDir={directory}/spool-%n
SlurmctldPidFile={directory}/slurmctld.pid
SlurmdPidFile={directory}/slurmd-%n.pid
SlurmctldLogFile={directory}/slurmctld.log
SlurmdLogFile={directory}/slurmd-%n.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/builtin
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmdTimeout=10
KillWait=2
NodeName=ash NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 RealMemory=1000
NodeName=beech NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 RealMemory=1000
NodeName=cedar NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs=1 RealMemory=1000
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class RealCluster:
    """Daemons of Slurm, all on this machine.

    Args:
        directory: Directory of their files.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start an authentication daemon, a controller and three nodes."""
        key = self._directory / "munge.key"
        key.write_bytes(secrets.token_bytes(1024))
        key.chmod(0o600)
        (self._directory / "state").mkdir()
        files = ("key-file=munge.key", "socket=munge.socket", "pid-file=munged.pid", "log-file=munged.log")
        options = [f"--{name}={self._directory / value}" for name, value in (x.split("=") for x in files)]
        self._run("munged", "--foreground", "--force", f"--seed-file={self._directory / 'munge.seed'}", *options)
        text = _CONFIGURATION.format(
            host=platform.node(), user=getpass.getuser(), directory=self._directory, ports=_free_ports(4)
        )
        (self._directory / "slurm.conf").write_text(text)
        _until(self._directory.joinpath("munge.socket").exists)
        self._run("slurmctld", "-D", "-c")
        for node in NODES:
            self.start_node(node)
        _until(lambda: _answer("sinfo", "-h", "-o", "%D %T") == "3 idle")

    def start_node(self, node: str) -> None:
        """Start the daemon of a node."""
        self._run("slurmd", "-D", "-N", node, key=node)

    def stop(self) -> None:
        """End all daemons and jobs."""
        if "slurmctld" in self._daemons:
            _answer("scancel", f"--user={getpass.getuser()}")
            _until(lambda: not _answer("squeue", "-h"))
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            daemon.wait(10)

    def _run(self, program: str, *arguments: str, key: str = "") -> None:
        with (self._directory / f"{key or program}.out").open("ab") as output:
            self._daemons[key or program] = subprocess.Popen(
                [_path(program), *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )


@contextmanager
def real_cluster() -> Iterator[RealCluster]:
    """A real cluster of the nodes ash, beech and cedar with one CPU each; skips where Slurm is not installed."""
    missing = [program for program in ("munged", "slurmctld", "slurmd", *PROGRAMS) if not _path(program)]
    if missing:
        pytest.skip(f"Slurm is not installed: no {missing[0]} (Debian: apt-get install slurm-wlm munge)")
    with tempfile.TemporaryDirectory(prefix="slurm-", dir="/tmp") as name, pytest.MonkeyPatch.context() as patch:
        os.chmod(name, 0o755)  # munged refuses a socket that others cannot reach
        patch.setenv("SLURM_CONF", f"{name}/slurm.conf")
        made = RealCluster(Path(name))
        try:
            made.start()
            yield made
        finally:
            made.stop()


def _path(program: str) -> str:
    return shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") or ""


def _answer(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _until(condition: Any) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline, "the cluster does not start or end"
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
