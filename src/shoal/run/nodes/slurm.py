"""The back end "slurm": nodes that Slurm gives, in an allocation or one by one, form a Ray cluster of the engine's."""

import logging
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import ClassVar
from uuid import uuid4

from shoal.core.device import Cluster
from shoal.core.errors import BackendError, DeviceError
from shoal.run.base import WorkerContext
from shoal.run.nodes.agent import python_command
from shoal.run.nodes.inventory import check_nodes, devices_on, names_nodes
from shoal.run.nodes.link import Carrier
from shoal.run.nodes.messages import NodeEnded
from shoal.run.nodes.ray import Ray, RayNode, living_nodes
from shoal.run.nodes.slurm_cluster import ClusterHead, be_node
from shoal.run.nodes.slurm_commands import (
    SlurmNode,
    allocation,
    cancel,
    controller,
    ended_jobs,
    requested_nodes,
    submit,
)

__all__ = ["Slurm"]

_log = logging.getLogger("shoal.run")

_WATCH_SECONDS = 5.0
"""Seconds between two looks at steps that have ended, and at the jobs in Slurm's queue."""
_JOIN_SECONDS = 180.0
"""Longest wait for the nodes of an allocation, which import Ray, perhaps from a slow file system."""
_PAUSE_SECONDS = 0.1
_SLURM_ENDED = frozenset({"CANCELLED", "DEADLINE", "NODE_FAIL", "PREEMPTED", "REVOKED", "TIMEOUT"})
"""States of jobs that Slurm has ended, so that their agents are not to blame."""


class NodeStep:
    """A node that `srun` starts in the allocation; it ends with this process.

    It has `joined` the cluster once, and `lives` if it was there at the last look.
    """

    def __init__(self, node: SlurmNode, head: ClusterHead) -> None:
        self.label = uuid4().hex
        self.name = node.name
        self.joined = False
        self.lives = False
        self._log = head.logs / f"{node.name}.log"
        with self._log.open("w") as output:
            self._srun = node.srun(_command(self.label), output)
        with suppress(BrokenPipeError):  # srun has ended, as `ended` tells
            print(head.contact, file=self._srun.stdin, flush=True)

    def ended(self) -> str:
        """How the node ended; "" while it may live: a node of the cluster outlives a `srun` that was killed."""
        status = self._srun.poll()
        if status is None or (status < 0 and self.lives):
            return ""
        return _last_line(self._log, of_srun=self.joined) or f"it ended with exit status {status}"


@dataclass(eq=False)
class BatchJob:
    """A batch job that is a node, which has no name until it has joined; `id` is Slurm's, the rest as of `NodeStep`."""

    id: str
    label: str
    name: str = ""
    joined: bool = False
    lives: bool = False


class Slurm(Ray):
    """Runs jobs on nodes that Slurm gives, in a Ray cluster whose head runs beside the engine.

    Inside an allocation, `srun` starts each of its nodes, with all CPUs and GPUs that the allocation has there; they
    are kept for the next study of the process. With options of `sbatch` the back end asks for nodes one by one, uses
    them as they come, and asks for others in place of those that it loses. Then a study begins without a node.

    A node that Slurm warns of its end, as by `--signal=B:TERM@120`, is left: its jobs are saved and continue elsewhere.
    """

    _sbatch: ClassVar[str | None] = None
    """Options of `sbatch`, which `connect` has checked; None: in an allocation."""
    _steps: ClassVar[dict[str, NodeStep]] = {}
    """The steps of the allocation, by node."""

    def __init__(self, worker_context: WorkerContext) -> None:
        nodes = allocation() if self._sbatch is None else []
        self._allocation = [node for node in nodes if devices_on(node.name, worker_context.devices) != []]
        self._wanted = 0 if self._sbatch is None else requested_nodes(self._sbatch)
        self._jobs: list[BatchJob] = []
        self._shares: dict[str, str] = {}  # name of a node -> what its first job has of the node
        self._asked = float("-inf")
        self._refusal = ""
        self._logs = worker_context.directory / "logs"
        for contact in worker_context.directory.glob("agents/*.contact"):  # of engines that were killed
            contact.unlink()
        try:
            super().__init__(worker_context)
        except BaseException:
            self.close()
            raise

    @classmethod
    def connect(cls, ray_address: str | None = None, sbatch: str | None = None) -> None:
        """Check that Slurm is here, and what is asked of it; start the head of a Ray cluster of this process.

        Args:
            sbatch: Options of `sbatch` for one node each; among them `--nodes`, the number of nodes. None: the study
                runs on the nodes of the allocation of this process.
        """
        super(Ray, cls).connect(ray_address)
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
        cls.leave_head()
        if cls._head is None or not cls._head.alive:
            cls._steps.clear()
            Ray._head = ClusterHead(allocation()[-1].name if sbatch is None else controller())

    @classmethod
    def discover(cls, devices: str | Sequence[str]) -> Cluster:
        """Start the nodes of the allocation and find their devices; with options of `sbatch` nodes are still to come.

        Raises:
            BackendError: A node cannot be started.
            DeviceError: A device does not exist, or nodes have other versions than the engine.
        """
        if cls._sbatch is not None:
            if names_nodes(devices):
                raise DeviceError(
                    f"devices={devices!r} names nodes, and with --sbatch Slurm chooses them; name what each node has, "
                    "such as 'cuda', and the nodes with --nodelist among the options of --sbatch"
                )
            return Cluster(())
        nodes = allocation()
        check_nodes([node.name for node in nodes], devices)
        wanted = [node for node in nodes if devices_on(node.name, devices) != []]
        _joined(cls._steps.values())  # which of them live now
        for node in wanted:
            cls._start_step(node)
        steps = [cls._steps[node.name] for node in wanted]
        deadline = time.monotonic() + _JOIN_SECONDS
        while len(found := _joined(steps)) < len(steps):
            for step in steps:
                if end := step.ended():
                    raise BackendError(f"node {step.name} of the allocation cannot run Shoal: {end}")
                if time.monotonic() > deadline and not step.lives:
                    raise BackendError(
                        f"node {step.name} of the allocation has not joined the Ray cluster of the engine for "
                        f"{_JOIN_SECONDS:.0f} s; see: sinfo -N -l"
                    )
            time.sleep(_PAUSE_SECONDS)
        return cls.find_on([replace(node, name=step.name) for node, step in found], devices)

    def nodes(self) -> list[RayNode]:
        """The nodes of the study that are there now; ask Slurm for those that are missing."""
        if time.monotonic() > self._asked + _WATCH_SECONDS:
            self._asked = time.monotonic()
            self._watch_steps()
            self._watch_jobs()
            self._ask_for_nodes()
        found = _joined([*self._jobs, *(self._steps[x.name] for x in self._allocation if x.name in self._steps)])
        for node, launch in found:
            launch.name = launch.name or self._name_for(node)
        return [replace(node, name=launch.name) for node, launch in found]

    def add_node(self, node: str, carrier: Carrier) -> None:
        """As for all nodes; if none has joined so far, the first batch job must be a usable one."""
        super().add_node(node, carrier)
        if self._sbatch is not None and not self._inventories:
            self._needed.add(node)

    def is_over(self) -> bool:
        """Return whether all nodes of the allocation cannot be used, or all jobs have failed."""
        return self._wanted == 0 and self._failed.issuperset(node.name for node in self._allocation)

    def close(self) -> None:
        """End all agents with their jobs, and cancel the jobs in Slurm's queue. May be called twice."""
        super().close()
        cancel([job.id for job in self._jobs])
        self._jobs.clear()

    @classmethod
    def _start_step(cls, node: SlurmNode) -> None:
        """Start a node of the allocation, unless it runs."""
        assert cls._head is not None
        if node.name not in cls._steps or cls._steps[node.name].ended():
            cls._steps[node.name] = NodeStep(node, cls._head)

    def _watch_steps(self) -> None:
        """Start the nodes of the allocation that have ended; one that ends again and again without joining is lost."""
        for node in self._allocation:
            step = self._steps.get(node.name)
            if step is not None and (end := step.ended()):
                if node.name in self._links:
                    self._lose(self._links[node.name], NodeEnded(end))
                elif not step.joined and node.name not in self._failed:
                    _log.warning("node %s has not started: %s", node.name, self._count_death(node.name, NodeEnded(end)))
            if self.usable(node.name):
                self._start_step(node)

    def _watch_jobs(self) -> None:
        """Forget jobs that have ended. Others are asked for only where Slurm has ended the job of a working agent."""
        ended = ended_jobs([job.id for job in self._jobs])
        for job in list(self._jobs):
            state = ended.get(job.id, "")
            if state and job.name in self._links:
                self._lose(self._links[job.name], NodeEnded(f"its Slurm job {job.id} has ended ({state})"))
            if state in _SLURM_ENDED and job.joined:
                del self._deaths[job.name]
                self._failed.discard(job.name)
            if state and not job.joined:
                log = self._logs / f"node-{job.id}.log"
                said = _last_line(log) if log.exists() else "does every node mount the study's directory?"
                self._lost[f"job {job.id}"] = f"it ended ({state}) before it had joined: {said} Log: {log}"
                _log.warning("Slurm job %s: %s", job.id, self._lost[f"job {job.id}"])
            elif job.name in self._failed:
                cancel([job.id])
            elif not state:
                continue
            self._wanted -= not job.joined or job.name in self._failed
            self._jobs.remove(job)

    def _ask_for_nodes(self) -> None:
        """Ask for the nodes that are missing; if Slurm refuses a job, the next look asks again."""
        while len(self._jobs) < self._wanted:
            try:
                self._ask_for_node()
            except BackendError as error:
                if not self._jobs and not self._links:
                    raise
                if str(error) != self._refusal:
                    self._refusal = str(error)
                    _log.warning("%s; the study continues with the nodes that it has, and asks again", error)
                return
        self._refusal = ""

    def _ask_for_node(self) -> None:
        assert self._head is not None
        self._logs.mkdir(exist_ok=True)
        contact = self.worker_context.directory / "agents" / f"{self.run_id}.contact"
        if not contact.exists():
            self._head.write_contact(contact)
        label = uuid4().hex
        command = _command(label, str(self.worker_context.directory), contact.name)
        log = str(self._logs).replace("%", "%%") + "/node-%j.log"
        options = ["--parsable", "--no-requeue", f"--output={log}", f"--error={log}"]
        script = f"#!/bin/sh\nexec {shlex.join(command)}\n"
        job = submit(self._sbatch or "", *options, script=script).strip().partition(";")[0]
        self._jobs.append(BatchJob(job, label))
        _log.info("Slurm job %s is to be a node", job)

    def _name_for(self, node: RayNode) -> str:
        """The name of the node of a job, which no job with other cores or GPUs of the node has had."""
        base, share = node.labels["shoal-node"], node.labels["shoal-share"]
        taken = {job.name for job in self._jobs}
        names = (x for x in chain([base], (f"{base}-{number}" for number in count(2))) if x not in taken)
        return next(name for name in names if self._shares.setdefault(name, share) == share)


def _joined(launches: Iterable[NodeStep | BatchJob]) -> list[tuple[RayNode, NodeStep | BatchJob]]:
    """Nodes of the cluster that these launches have started, each with its launch."""
    known = {launch.label: launch for launch in launches}
    found = [(node, known[x]) for node in living_nodes({}) if (x := node.labels.get("shoal-launch", "")) in known]
    for launch in known.values():
        launch.lives = False
    for _, launch in found:
        launch.joined = launch.lives = True
    return found


def _command(*arguments: str) -> list[str]:
    return python_command(be_node.__name__, be_node.__module__, sys.path, *arguments)


def _last_line(log: Path, *, of_srun: bool = False) -> str:
    """Return the last line of `srun` itself, which says how a node was ended, or of the node; else the last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return next(chain((x for x in reversed(lines) if x.startswith("srun:") is of_srun), reversed(lines)), "")
