"""The back end "slurm": Slurm starts an agent on each node of an allocation, or in batch jobs of the study's own."""

import base64
import json
import logging
import os
import pickle
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from typing import ClassVar

from shoal.backends.base import WorkerContext
from shoal.backends.nodes.agent import python_command
from shoal.backends.nodes.backend import Nodes
from shoal.backends.nodes.inventory import (
    NodeInventory,
    check_nodes,
    cluster_of,
    devices_on,
    names_nodes,
    take_node_inventory,
    version_fault,
    versions,
)
from shoal.backends.nodes.link import LEASE_SECONDS, NodeGone, NodeLink
from shoal.backends.nodes.probe import agent_probe_fault
from shoal.backends.nodes.slurm_commands import (
    COMMAND_SECONDS,
    SlurmNode,
    allocation,
    cancel,
    ended_jobs,
    requested_nodes,
    submit,
)
from shoal.backends.nodes.sockets import AgentListener, Launch, SocketCarrier, call_engine
from shoal.cluster.machine import ThisMachine
from shoal.core.device import Cluster
from shoal.core.errors import BackendError, DeviceError

__all__ = ["Slurm", "be_agent", "print_inventory"]

_log = logging.getLogger("shoal.backends")

_WATCH_SECONDS = 5.0
"""Seconds between two looks at nodes without an agent, and at the jobs in Slurm's queue."""
_PAUSE_SECONDS = 0.5
_FAULT = 3
"""Exit status of an agent whose node cannot be used; its last line says why."""
_SLURM_ENDED = frozenset({"CANCELLED", "DEADLINE", "NODE_FAIL", "PREEMPTED", "REVOKED", "TIMEOUT"})
"""States of jobs that Slurm has ended, so that their agents are not to blame."""


class Slurm(Nodes):
    """Runs jobs on nodes that Slurm gives, by an agent on each.

    Inside an allocation, `srun` starts an agent on each of its nodes, with all CPUs and GPUs that the allocation has
    there. With options of `sbatch` the back end asks for nodes one by one, uses them as they come, and asks for others
    in place of those that it loses. Then a study begins without a node.
    """

    nodes_return = True

    _sbatch: ClassVar[str | None] = None
    """Options of `sbatch`, which `connect` has checked; None: in an allocation."""

    def __init__(self, worker_context: WorkerContext, lease: float = LEASE_SECONDS) -> None:
        self._allocation = allocation() if self._sbatch is None else []
        super().__init__(worker_context, lease)
        self._wanted = 0 if self._sbatch is None else requested_nodes(self._sbatch)
        self._jobs: list[_BatchJob] = []
        self._shares: dict[str, object] = {}  # name of a node -> what its first job has of the node
        self._launches = count(1)
        self._watched = float("-inf")
        self._key_file = f"{self.run_id}.key"
        self._listener = AgentListener(worker_context.directory / "agents" / self._key_file)
        self._logs = worker_context.directory / "logs"
        self._logs.mkdir(exist_ok=True)
        self.look_for_nodes()

    @classmethod
    def connect(cls, ray_address: str | None = None, sbatch: str | None = None) -> None:
        """Check that Slurm is here, and what is asked of it.

        Args:
            sbatch: Options of `sbatch` for one node each; among them `--nodes`, the number of nodes. None: the study
                runs on the nodes of the allocation of this process.
        """
        super().connect(ray_address)
        for program in ("srun", "scontrol") if sbatch is None else ("sbatch", "squeue", "scancel"):
            if shutil.which(program) is None:
                raise BackendError(
                    f"back end 'slurm' needs {program!r}, which is not on PATH; call it where Slurm's commands are, on "
                    "a login node or in a job"
                )
        if sbatch is not None:
            requested_nodes(sbatch)
            submit(sbatch, "--test-only", "--wrap=true")
        elif "SLURM_JOB_ID" not in os.environ:
            raise BackendError(
                "back end 'slurm' is for a process in an allocation, and SLURM_JOB_ID is not set; call it in a batch "
                "script or within salloc, or let it ask for nodes: --sbatch '--nodes=4 --time=4:00:00' (in Python "
                "sbatch=...)"
            )
        cls._sbatch = sbatch

    @classmethod
    def discover(cls, devices: str | Sequence[str]) -> Cluster:
        """Find devices on all nodes of the allocation; with options of `sbatch` the nodes are still to come."""
        if cls._sbatch is not None:
            if names_nodes(devices):
                raise DeviceError(
                    f"devices={devices!r} names nodes, and with --sbatch Slurm chooses them; name what each node has, "
                    "such as 'cuda', and the nodes with --nodelist among the options of --sbatch"
                )
            return Cluster(())
        nodes = allocation()
        check_nodes([node.name for node in nodes], devices)
        settings = {node: devices_on(node.name, devices) for node in nodes}
        steps = {
            node.name: node.srun(python_command("print_inventory", __name__, sys.path, json.dumps(setting)))
            for node, setting in settings.items()
            if setting != []
        }
        try:
            return cluster_of({name: _inventory(name, step) for name, step in steps.items()}, devices)
        finally:
            for step in steps.values():
                step.kill()
                step.communicate()

    def look_for_nodes(self) -> None:
        """Use nodes whose agents have called; every few seconds, start agents where there are none, and submit jobs."""
        for job in self._jobs:
            if job.greeting and job.link is None:
                self._use(job)
        if time.monotonic() < self._watched + _WATCH_SECONDS:
            return
        self._watched = time.monotonic()
        for node in self._allocation:
            if self.usable(node.name) and devices_on(node.name, self.worker_context.devices) != []:
                launch = str(next(self._launches))
                step = _Step(launch, node, self._logs / f"agent-{node.name}.log", self._command(launch))
                self._listener.expect(step)
                self.add_node(node.name, SocketCarrier(self.setup(node.name), step))
        self._forget_ended_jobs()
        while len(self._jobs) < self._wanted:
            self._ask_for_node()

    def waiting_reason(self, node: str) -> str:
        """Return where the messages of `srun` are."""
        return f"srun has not started its agent; see {self._logs / f'agent-{node}.log'}"

    def is_over(self) -> bool:
        """Return whether all nodes of the allocation cannot be used, or all jobs have failed."""
        return super().is_over() if self._sbatch is None else self._wanted == 0

    def close(self) -> None:
        """End all agents with their jobs, and cancel the jobs in Slurm's queue. May be called twice."""
        super().close()
        self._listener.close()
        cancel([job.id for job in self._jobs])
        self._jobs.clear()

    def _command(self, launch: str) -> list[str]:
        directory = str(self.worker_context.directory)
        return python_command("be_agent", __name__, sys.path, directory, self._key_file, launch)

    def _ask_for_node(self) -> None:
        launch = str(next(self._launches))
        log = str(self._logs).replace("%", "%%") + "/agent-%j.log"
        script = f"#!/bin/sh\nexec {shlex.join(self._command(launch))}\n"
        options = ["--parsable", "--no-requeue", f"--output={log}", f"--error={log}"]
        job = _BatchJob(launch, submit(self._sbatch or "", *options, script=script).strip().partition(";")[0])
        self._jobs.append(job)
        self._listener.expect(job)
        _log.info("Slurm job %s is to be a node", job.id)

    def _use(self, job: "_BatchJob") -> None:
        """Add the node of a job, under a name that no job with other cores or GPUs of the node has had."""
        share = [job.greeting["cores"], job.greeting["gpus"]]
        names = chain([job.greeting["node"]], (f"{job.greeting['node']}-{number}" for number in count(2)))
        name = next(x for x in names if x not in self._links and self._shares.setdefault(x, share) == share)
        self.add_node(name, SocketCarrier(self.setup(name), job))
        job.link = self._links[name]
        if not self._inventories:
            self._needed.add(name)

    def _forget_ended_jobs(self) -> None:
        """Forget jobs without an agent. Others are asked for only where Slurm has ended the job of a working agent."""
        ended = ended_jobs([job.id for job in self._jobs if not job.greeting])
        for job in list(self._jobs):
            if job.id in ended and not job.greeting:
                log = self._logs / f"agent-{job.id}.log"
                said = _last_line(log.read_text()) if log.exists() else "does every node mount the study's directory?"
                self._lost[f"job {job.id}"] = (
                    f"it ended ({ended[job.id]}) before its agent had called: {said} Log: {log}"
                )
                _log.warning("Slurm job %s: %s", job.id, self._lost[f"job {job.id}"])
                self._wanted -= 1
            elif job.link is not None and self._links.get(job.link.node) is not job.link:
                if job.state in _SLURM_ENDED:
                    del self._deaths[job.link.node]
                elif job.link.node in self._failed:
                    self._wanted -= 1
            else:
                continue
            self._jobs.remove(job)


class _Step(Launch):
    """An agent that `srun` starts on a node of the allocation."""

    def __init__(self, name: str, node: SlurmNode, log: Path, command: Sequence[str]) -> None:
        super().__init__(name)
        self._log = log
        with log.open("a") as output:
            self._begin = output.tell()
            self._srun = node.srun(command, stdout=output, stderr=subprocess.STDOUT)

    def ended(self) -> NodeGone | None:
        """Return how `srun` ended; if it was killed, an agent that has called may live."""
        status = self._srun.poll()
        if status is None or (status < 0 and self.greeting):
            return None
        output = self._log.read_bytes()[self._begin :].decode(errors="replace")
        return NodeGone(_last_line(output) or f"its agent ended with exit status {status}", failed=status == _FAULT)

    def close(self, seconds: float) -> None:
        for end in (None, self._srun.terminate, self._srun.kill):
            if end is not None:
                end()
            with suppress(subprocess.TimeoutExpired):
                self._srun.wait(seconds)
                return
            seconds = _WATCH_SECONDS


class _BatchJob(Launch):
    def __init__(self, name: str, id: str) -> None:
        super().__init__(name)
        self.id = id
        self.link: NodeLink | None = None
        self.state = ""
        """Slurm's name of the state in which it ended; "" if that is not known."""
        self._asked = float("-inf")

    def ended(self) -> NodeGone | None:
        """Ask Slurm, at most every few seconds."""
        if time.monotonic() < self._asked + _WATCH_SECONDS:
            return None
        self._asked = time.monotonic()
        self.state = ended_jobs([self.id]).get(self.id, "")
        return NodeGone(f"its Slurm job {self.id} has ended ({self.state})") if self.state else None

    def close(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not ended_jobs([self.id]):
            time.sleep(_PAUSE_SECONDS)
        cancel([self.id])


def be_agent() -> None:
    """Be the agent of a node; arguments: the directory of the study, the engine's file there, and the launch."""
    directory, file, launch = Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    node = os.environ["SLURMD_NODENAME"]
    cores, gpus, fault = _share()
    if fault := fault or agent_probe_fault(directory, node, file):
        print(fault, flush=True)
        os._exit(_FAULT)
    about = {"launch": launch, "node": node, "cores": cores, "gpus": gpus, "versions": versions()}
    call_engine(directory / "agents" / file, about)
    os._exit(0)


def print_inventory() -> None:
    """Print the versions and the devices of a node; the argument is the setting of its devices."""
    cores, _, fault = _share()
    if fault:
        sys.exit(fault)
    found = take_node_inventory(json.loads(sys.argv[2]), cores)
    print(json.dumps([versions(), base64.b64encode(pickle.dumps(found)).decode()]))


def _share() -> tuple[int | None, list[str], str]:
    """Return the cores and the UUIDs of the GPUs that Slurm gives this process, and a fault; hide GPUs of others."""
    cores, gpus = os.environ.get("SLURM_CPUS_ON_NODE"), os.environ.get("SLURM_GPUS_ON_NODE") or "0"
    if gpus == "0":
        os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    found = ThisMachine().gpus().gpus
    fault = ""
    if found and "CUDA_VISIBLE_DEVICES" not in os.environ:
        fault = (
            f"Slurm gives this job {gpus} GPUs here and does not say which, as CUDA_VISIBLE_DEVICES is not set; "
            "gres.conf must name their files"
        )
    return int(cores) if cores else None, [gpu.uuid for gpu in found], fault


def _inventory(node: str, step: "subprocess.Popen[str]") -> NodeInventory:
    try:
        output, errors = step.communicate(timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise BackendError(
            f"node {node} of the allocation has not answered for {COMMAND_SECONDS:.0f} s; see: sinfo -N -l"
        ) from error
    if step.returncode:
        raise BackendError(f"node {node} of the allocation cannot run Shoal: {_last_line(errors)}")
    found, content = json.loads(output.splitlines()[-1])
    if fault := version_fault(node, found):
        raise DeviceError(fault)
    inventory: NodeInventory = pickle.loads(base64.b64decode(content))
    return inventory


def _last_line(output: str) -> str:
    """Return the last line that is not of `srun` itself, else its last one; a line of the agent says more."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    return next(chain((x for x in reversed(lines) if not x.startswith("srun:")), reversed(lines)), "")
