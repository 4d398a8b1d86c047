"""The back end of several nodes: it routes each job to the agent of its device's node."""

import logging
import queue
import time
import uuid
from abc import abstractmethod
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from shoal.core.command import BackendCommand, KillJob, ReleaseDevice, StartJob, StopJob, UpdateJob
from shoal.core.device import Cluster, Device
from shoal.core.errors import BackendError, DeviceError
from shoal.core.job import Job, JobUpdate, log_path
from shoal.host.monitor import Condition
from shoal.run.base import Backend, Ended, Event, Outcome, WorkerContext
from shoal.run.nodes.inventory import NodeInventory, cluster_of, names_nodes, remove_probes, version_fault, write_probe
from shoal.run.nodes.link import LEASE_SECONDS, Carrier, NodeLink
from shoal.run.nodes.messages import AgentMessage, AgentSetup, NodeEnded, NodeJoined, NodeState, ProcessSettings

__all__ = ["Nodes", "NodesMonitor"]

_log = logging.getLogger("shoal.run")

_JOIN_SECONDS = 30.0
"""Seconds after which the devices of a node without an agent are not expected any more to be there soon."""
_MOST_DEATHS = 5
"""Deaths of a node's agents, without a finished job in between, after which the node gets no other one."""


class Nodes(Backend):
    """Routes jobs to agents, one on each node, which run them in local back ends.

    A device has the name of its node before its own: "ash/cuda:0". A node that is lost ends its jobs as `LOST`; its
    devices are unhealthy until another agent has started under its name.

    A subclass says how agents are started: it calls `add_node` in its constructor and, where nodes come and go, in
    `look_for_nodes`.

    Args:
        lease: Seconds without a call after which an agent ends its jobs.
    """

    nodes_return = False
    """Whether a node that was lost may come back, so that a study without any waits."""

    def __init__(self, worker_context: WorkerContext, lease: float = LEASE_SECONDS) -> None:
        super().__init__(worker_context)
        self.run_id = uuid.uuid4().hex[:12]
        """Id of this run of the engine, in the names of its files."""
        self._lease = lease
        self._inbox: queue.SimpleQueue[tuple[NodeLink, AgentMessage]] = queue.SimpleQueue()
        self._links: dict[str, NodeLink] = {}
        self._since: dict[str, float] = {}  # node -> start of its agent, of a monotonic clock
        self._inventories: dict[str, NodeInventory] = {}
        self._states: dict[str, NodeState] = {}
        self._lost: dict[str, str] = {}  # node -> reason
        self._failed: set[str] = set()  # nodes that get no other agent
        self._draining: dict[str, str] = {}  # node that is about to end -> reason
        self._deaths: Counter[str] = Counter()  # node -> ends of its agents since its last finished job
        self._needed: set[str] = set()  # nodes that the study began with and that have not joined
        self._polled = False
        self._devices: dict[str, Device] = {}  # running job -> its device
        self._events: list[Event] = []
        self._closed = False
        write_probe(worker_context.directory, self.run_id)

    @abstractmethod
    def look_for_nodes(self) -> None:
        """Call `add_node` for nodes that are new and without an agent. `poll` calls it; it must not wait."""

    def is_over(self) -> bool:
        """Return whether no agent will come, now that there is none."""
        return not self.nodes_return or self._failed == self._lost.keys() != set()

    def waiting_reason(self, node: str) -> str:
        """Return why the agent of a node has not started yet."""
        return "its agent has not started yet"

    def setup(self, node: str, cores: int | None = None, gpus: int | None = None) -> AgentSetup:
        """The settings of a node's agent, which may use so many CPU cores and GPUs there; None: all."""
        return AgentSetup(
            node=node,
            worker_context=replace(self.worker_context, fork=False),
            devices=self.worker_context.devices,
            cores=cores,
            gpus=gpus,
            lease=self._lease,
            probe=self.run_id,
            process=ProcessSettings.of_this_process(),
        )

    def add_node(self, node: str, carrier: Carrier) -> None:
        """Use the agent that a carrier reaches, which is started with `setup(node)`."""
        self._links[node] = NodeLink(node, carrier, self._inbox, self._lease)
        self._since[node] = time.monotonic()
        if not self._polled:
            self._needed.add(node)

    def usable(self, node: str) -> bool:
        """Return whether a node has no agent now and may get one."""
        return node not in self._links and node not in self._failed

    def drain(self, node: str, reason: str) -> None:
        """Stop the jobs of a node that is about to end. They end as lost, and the agent once they have ended."""
        if node in self._links and node not in self._draining:
            self._draining[node] = reason
            _log.info("node %s is about to end: %s", node, reason)
            for job in self._jobs_on(node):
                self.stop(job)

    @property
    def starting(self) -> bool:
        """Whether no node's workers have their modules imported yet."""
        return not any(not state.starting for state in self._states.values())

    def start(self, job: Job, device: Device) -> None:
        """Send the job to the agent of the device's node; on a node that was just lost it ends as lost."""
        if self._closed:
            raise BackendError(f"job {job.id!r} cannot start: the back end is closed")
        if job.id in self._devices:
            raise BackendError(f"job {job.id!r} cannot start: a job of that id is running")
        if not device.node:
            raise BackendError(f"job {job.id!r} cannot start: {device.name!r} names no node, as in 'ash/{device.name}'")
        if device.node not in self._links or device.node in self._draining:
            self._events.append(self._lost_end(job.id, device.node))
            return
        self._devices[job.id] = device
        self._links[device.node].send(StartJob(job, replace(device, name=device.local_name)))

    def stop(self, job: str) -> None:
        """Send the request to stop to the job's agent."""
        self._send(job, StopJob(job))

    def kill(self, job: str) -> None:
        """Send the kill to the job's agent; a job whose agent has not started ends at once."""
        device = self._devices.get(job)
        if device is not None and self._links[device.node].withdraw(job):
            del self._devices[job]
            self._events.append(Ended(job, Outcome.CRASHED, f"it was ended before node {device.node} had started it"))
        else:
            self._send(job, KillJob(job))

    def change(self, job: str, change: JobUpdate) -> None:
        """Send the change to the job's agent."""
        self._send(job, UpdateJob(job, change))

    def release_device(self, device: str) -> None:
        """Let the agent end the idle workers of a device."""
        node, _, name = device.rpartition("/")
        if node in self._links:
            self._links[node].send(ReleaseDevice(name))

    def can_limit_compute(self, device: Device) -> bool:
        """Return whether MPS limits the processes on a device, as its agent said last."""
        state = self._states.get(device.node)
        return state is not None and device.local_name in state.limited

    def find(self, devices: str | Sequence[str]) -> Cluster:
        """Find the study's devices, and no others, on the nodes whose agents have started."""
        if devices != self.worker_context.devices:
            added = devices if isinstance(devices, str) else ", ".join(devices)
            raise DeviceError(
                f"{added} cannot be added: a study on nodes of a cluster takes back only devices that were removed "
                "from it; stop the study, then: shoal resume DIR --devices ..."
            )
        return cluster_of(self._inventories, devices)

    def monitor(self, cluster: Cluster) -> "NodesMonitor":
        """Return a monitor of all nodes."""
        return NodesMonitor(self, cluster)

    def condition(self, device: Device) -> Condition:
        """The condition of a device, as its agent said last."""
        node = device.node
        if node in self._lost and node not in self._links:
            return Condition(False, f"node {node} is gone: {self._lost[node].splitlines()[0]}")
        if node not in self._inventories or node in self._lost:  # its agent, or another one, is starting
            soon = node not in self._lost and time.monotonic() < self._since.get(node, 0.0) + _JOIN_SECONDS
            return Condition() if soon else Condition(False, f"node {node}: {self.waiting_reason(node)}")
        if node in self._draining and device.name not in {each.name for each in self._devices.values()}:
            return Condition(False, f"node {node} is about to end: {self._draining[node]}")
        there = {each.name for _, each in self._inventories[node].cluster}
        if device.local_name not in there:
            return Condition(False, f"node {node} no longer has it")
        state = self._states.get(node)
        return Condition() if state is None else state.conditions.get(device.local_name, Condition())

    def poll(self, timeout: float) -> list[Event]:
        """Return the events since the last call; wait up to `timeout` seconds for the first.

        A node of the beginning that cannot be used while none has joined, or no node left for jobs, is a BackendError.
        """
        deadline = time.monotonic() + timeout
        self._polled = True
        while not self._closed:
            self.look_for_nodes()
            self._end_drained()
            waits = not self._events and (self._links or self.nodes_return)
            self._take_messages(max(0.0, deadline - time.monotonic()) if waits else 0.0)
            if self._events:
                events, self._events = self._events, []
                return events
            if not self._links and self.is_over():
                losses = "; ".join(f"{node}: {reason}" for node, reason in self._lost.items())
                raise BackendError(f"no node can run jobs any more: {losses}")
            if time.monotonic() >= deadline:
                break
        return []

    def close(self) -> None:
        """End all agents with their jobs. May be called twice."""
        self._closed = True
        self._devices.clear()
        for link in self._links.values():
            link.end()
        while self._links:
            self._links.popitem()[1].close()
        remove_probes(self.worker_context.directory, self.run_id)

    def _send(self, job: str, command: BackendCommand) -> None:
        if job in self._devices:
            self._links[self._devices[job].node].send(command)

    def _jobs_on(self, node: str) -> list[str]:
        return [job for job, device in self._devices.items() if device.node == node]

    def _take_messages(self, timeout: float) -> None:
        """Take all messages that are there; wait for the first one."""
        try:
            link, message = self._inbox.get(timeout=timeout) if timeout else self._inbox.get_nowait()
            while True:
                if self._links.get(link.node) is link:  # else it has been given up
                    self._take(link, message)
                link, message = self._inbox.get_nowait()
        except queue.Empty:
            pass

    def _take(self, link: NodeLink, message: AgentMessage) -> None:
        match message:
            case NodeJoined():
                self._join(link, message)
            case NodeState():
                self._states[link.node] = message
            case NodeEnded():
                self._lose(link, message)
            case _ if message.job in self._devices:
                if isinstance(message, Ended):
                    del self._devices[message.job]
                    if message.outcome is Outcome.FINISHED:
                        del self._deaths[link.node]
                    elif message.outcome is Outcome.STOPPED and link.node in self._draining:
                        message = self._lost_end(message.job, link.node)
                self._events.append(message)

    def _end_drained(self) -> None:
        """End the agents of nodes that are about to end, once no job runs there; that is no death of theirs."""
        for node, reason in list(self._draining.items()):
            if not self._jobs_on(node):
                self._lose(self._links[node], NodeEnded(reason))
                del self._deaths[node]

    def _join(self, link: NodeLink, joined: NodeJoined) -> None:
        """Take in a node if it has the same versions, the directory and devices of the study; else lose it."""
        node = link.node
        if wrong := version_fault(node, joined.versions):
            self._lose(link, NodeEnded(wrong, failed=True))
            return
        if joined.fault:
            self._lose(link, NodeEnded(joined.fault, failed=True), absent=not joined.cluster.nodes)
            return
        self._needed.discard(node)
        self._lost.pop(node, None)
        self._inventories[node] = NodeInventory(joined.cluster, "", joined.versions)

    def _lose(self, link: NodeLink, end: NodeEnded, *, absent: bool = False) -> None:
        """End the jobs of a node whose agent has ended."""
        node = link.node
        link.close()
        del self._links[node]
        self._states.pop(node, None)
        self._inventories.pop(node, None)
        self._draining.pop(node, None)
        reason = self._count_death(node, end)
        for job in self._jobs_on(node):
            del self._devices[job]
            self._events.append(self._lost_end(job, node))
        quiet = absent and not names_nodes(self.worker_context.devices)
        if end.failed and node in self._needed and not quiet and not self._inventories:
            self._needed.clear()
            raise BackendError(f"node {node} cannot be used: {reason}")
        self._needed.discard(node)
        _log.log(logging.INFO if quiet else logging.WARNING, "node %s is gone: %s", node, reason)

    def _count_death(self, node: str, end: NodeEnded) -> str:
        """Record that an agent has ended, and return the reason; one that failed, or died too often, was the last."""
        self._deaths[node] += 1
        last = end.failed or self._deaths[node] >= _MOST_DEATHS
        self._lost[node] = end.reason
        if last and not end.failed:
            self._lost[node] = (
                f"{_MOST_DEATHS} of its agents ended without a finished job in between, the last one: {end.reason}"
            )
        if last:
            self._failed.add(node)
        return self._lost[node]

    def _lost_end(self, job: str, node: str) -> Ended:
        reason = self._draining.get(node) or self._lost.get(node, "it has no agent")
        log = log_path(self.worker_context.directory, job)
        return Ended(job, Outcome.LOST, f"node {node} is gone: {reason}\nLog: {log}")


class NodesMonitor:
    """Monitors the devices of all nodes: each agent monitors those of its node, and a lost node loses its devices."""

    def __init__(self, nodes: Nodes, cluster: Cluster) -> None:
        self._nodes = nodes
        self._cluster = cluster

    def watch(self, cluster: Cluster) -> None:
        """Monitor these devices from now on."""
        self._cluster = cluster

    def conditions(self, own: Collection[int]) -> Mapping[str, Condition]:
        """Return the condition of every device by name; an agent knows the study's processes on its node by itself."""
        return {device.name: self._nodes.condition(device) for _, device in self._cluster}
