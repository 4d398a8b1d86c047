"""The back end "ray": Ray Core starts an agent on each node of a cluster, and carries the calls to it."""

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import chain, count
from typing import Any, ClassVar

from shoal.backends.base import WorkerContext
from shoal.backends.nodes.agent import Agent, enter
from shoal.backends.nodes.backend import Nodes
from shoal.backends.nodes.inventory import NodeInventory, check_nodes, cluster_of, devices_on, take_node_inventory
from shoal.backends.nodes.link import LEASE_SECONDS, Carrier, NodeGone, NodeUnreachable
from shoal.backends.nodes.messages import AgentSetup, MessageBatch
from shoal.core.command import BackendCommand
from shoal.core.device import Cluster
from shoal.core.errors import BackendError

__all__ = ["Ray", "is_address_of"]

_log = logging.getLogger("shoal.backends")

_CONNECT_SECONDS = 5.0
"""Longest wait for a TCP connection to the address of a cluster; Ray itself tries for minutes."""
_INVENTORY_SECONDS = 60.0
"""Longest wait for the inventory of a node, whose process imports Shoal."""
_ANSWER_SECONDS = 5.0
"""Longest wait for the answer of an agent after its own time."""
_CLOSE_SECONDS = 15.0
"""Longest wait for an agent to end its jobs."""
_WATCH_SECONDS = 3.0
"""Seconds between two looks at Ray's list of nodes; Ray sends no events of nodes."""


class RayAgent:
    """The actor of a node: an agent in a process of its own, which is a worker process of Ray's."""

    def __init__(self, setup: AgentSetup) -> None:
        enter(setup)
        self._agent = Agent(setup)

    def post(self, first: int, commands: Sequence[BackendCommand]) -> None:
        """As `Agent.post`."""
        self._agent.post(first, commands)

    def fetch(self, acknowledged: int, timeout: float) -> MessageBatch:
        """As `Agent.fetch`."""
        return self._agent.fetch(acknowledged, timeout)

    def close(self) -> None:
        """End all jobs."""
        self._agent.close()


@dataclass(frozen=True)
class _RayNode:
    """A living node of the cluster.

    Args:
        name: Name of the node in Shoal.
        id: Ray's id.
        cpus: Cores that Ray may give away there.
        gpus: GPUs that Ray may give away there.
    """

    name: str
    id: str
    cpus: int
    gpus: int


class Ray(Nodes):
    """Runs jobs on the nodes of a Ray cluster, by an agent on each.

    An agent reserves all cores and GPUs that Ray has on its node, so it waits until other programs of the cluster have
    given them back, and no two agents are on one node. Ray ends the agents when the engine's process has ended.

    Args:
        worker_context: Context of the workers of the study.
        lease: As for `Nodes`.

    Raises:
        BackendError: This process cannot be connected to a cluster.
    """

    nodes_return = True

    _connected_by: ClassVar[tuple[str, str]] = ("", "")
    """The address that this process connected by, and the cluster's own."""

    def __init__(self, worker_context: WorkerContext, lease: float = LEASE_SECONDS) -> None:
        self.connect()
        super().__init__(worker_context, lease)
        self._ids: dict[str, str] = {}  # node with an agent -> Ray's id of the node
        self._watched = float("-inf")
        self._free: Mapping[str, Mapping[str, float]] | None = None  # id of a node -> free resources; None: not known
        self.look_for_nodes()

    @classmethod
    def connect(cls, ray_address: str | None = None, sbatch: str | None = None) -> None:
        """Connect this process to a Ray cluster, unless it is connected.

        Args:
            ray_address: "10.0.0.1:6379" or "auto"; None: `$RAY_ADDRESS`, else a cluster that runs on this machine, else
                a new one of this machine alone, which ends with this process.
            sbatch: None.

        Raises:
            BackendError: Ray is not installed, or no cluster answers at the address.
        """
        super().connect(sbatch=sbatch)
        if find_spec("ray") is None:
            raise BackendError(
                "back end 'ray' needs Ray, which is not installed. Install it with: pip install 'shoal[ray]'"
            )
        import ray

        if ray.is_initialized():
            connected = ray.get_runtime_context().gcs_address
            if not is_address_of(ray_address, connected, cls._connected_by):
                raise BackendError(
                    f"this process is connected to the Ray cluster at {connected!r}, so it cannot use {ray_address!r}; "
                    "call ray.shutdown() first"
                )
            return
        address = ray_address or os.environ.get("RAY_ADDRESS") or None
        _check_address(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise BackendError(
                f"no connection to the Ray cluster at {address or 'this machine'!r}: {error}; look at: ray status"
            ) from error
        cls._connected_by = (address or "", ray.get_runtime_context().gcs_address)

    @classmethod
    def discover(cls, devices: str | Sequence[str]) -> Cluster:
        """Find devices on all nodes of the cluster.

        Raises:
            DeviceError: No node has a requested device, a node is not there, or the versions of nodes differ.
            BackendError: A node cannot run Shoal.
        """
        cls.connect()
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

        task = ray.remote(num_cpus=0, max_retries=0)(_inventory)
        threads = os.environ.get("OMP_NUM_THREADS")
        answers: dict[str, Any] = {}
        nodes = _nodes({})
        check_nodes([node.name for node in nodes], devices)
        for node in nodes:
            if (setting := devices_on(node.name, devices)) != []:
                here = task.options(scheduling_strategy=OnNode(node.id, soft=False))
                answers[node.name] = here.remote(setting, node.cpus or None, node.gpus, threads)
        found: dict[str, NodeInventory] = {}
        for name, answer in answers.items():
            try:
                found[name] = ray.get(answer, timeout=_INVENTORY_SECONDS)
            except ray.exceptions.RayError as error:
                raise BackendError(f"node {name} of the Ray cluster cannot run Shoal: {_short(error)}") from error
        return cluster_of(found, devices)

    def look_for_nodes(self) -> None:
        """Start agents on nodes that have none, at most every few seconds."""
        if time.monotonic() < self._watched + _WATCH_SECONDS:
            return
        self._watched, self._free = time.monotonic(), None
        for node in _nodes(self._ids):
            if self.usable(node.name) and devices_on(node.name, self.worker_context.devices) != []:
                self._ids[node.name] = node.id
                self.add_node(node.name, _RayCarrier(self.setup(node.name, node.cpus or None, node.gpus), node))

    def waiting_reason(self, node: str) -> str:
        """Return what Ray has free on a node; an agent needs all of it."""
        if self._free is None:
            self._free = _free_resources()
        free = self._free.get(self._ids.get(node, ""))
        text = "" if free is None else f"; free are {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs"
        return (
            f"Ray has not started its agent, which needs all CPUs and GPUs that Ray has there{text}; `ray list actors` "
            "shows who holds the others"
        )


class _RayCarrier(Carrier):
    """Carries calls to an actor, which it starts.

    Ray calls commands and fetches in two threads of the actor, each in order: else a stop may overtake its start.

    Args:
        setup: Settings of the agent.
        node: Node of the agent.
    """

    def __init__(self, setup: AgentSetup, node: _RayNode) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

        remote: Any = ray.remote
        actor = remote(concurrency_groups={"commands": 1, "messages": 1})(RayAgent)
        self._actor = actor.options(
            num_cpus=node.cpus, num_gpus=node.gpus, max_restarts=0, scheduling_strategy=OnNode(node.id, soft=False)
        ).remote(setup)
        self._post = self._actor.post.options(concurrency_group="commands")
        self._fetch = self._actor.fetch.options(concurrency_group="messages")
        self._answer: Any = None  # of a fetch that has not come so far
        self._ended: Any = None

    def post(self, first: int, commands: Sequence[BackendCommand]) -> None:
        """Call the actor; Ray keeps the call until it is connected."""
        self._post.remote(first, list(commands))

    def fetch(self, acknowledged: int, timeout: float) -> MessageBatch:
        """Call the actor; an answer that is late is waited for again, and not called for twice."""
        import ray

        if self._answer is None:
            self._answer = self._fetch.remote(acknowledged, timeout)
        try:
            batch: MessageBatch = ray.get(self._answer, timeout=timeout + _ANSWER_SECONDS)
        except ray.exceptions.GetTimeoutError as error:
            raise NodeUnreachable("no answer") from error
        except ray.exceptions.ActorUnavailableError as error:
            self._answer = None
            raise NodeUnreachable(_short(error)) from error
        except ray.exceptions.RayError as error:
            raise NodeGone(_short(error), bool(getattr(error, "actor_init_failed", False))) from error
        self._answer = None
        return batch

    def end(self) -> None:
        """Call the actor."""
        self._ended = self._actor.close.remote()

    def close(self) -> None:
        """Wait for the end of the agent's jobs, and end the actor, which gives back what it reserves."""
        import ray

        if self._ended is not None:
            with suppress(ray.exceptions.RayError):  # it has ended already, or takes too long: then it is killed
                ray.get(self._ended, timeout=_CLOSE_SECONDS)
            self._ended = None
        ray.kill(self._actor)


def is_address_of(address: str | None, connected: str, connected_by: tuple[str, str]) -> bool:
    """Return whether an address that a user gives stands for the cluster that this process is connected to.

    Args:
        address: As for `Ray.connect`.
        connected: Address of the cluster, as Ray says.
        connected_by: The address that the process connected by, and that of its cluster then; another one may have
            been connected to in between.
    """
    return address in (None, "auto", connected) or (address, connected) == connected_by


def _free_resources() -> Mapping[str, Mapping[str, float]]:
    """Return what is free on each node by its id; nothing if Ray, of which this is no public function, fails."""
    import ray

    try:
        state: Any = ray._private.state
        free: Mapping[str, Mapping[str, float]] = state.available_resources_per_node()
    except (AttributeError, RuntimeError, ray.exceptions.RayError) as error:
        _log.info("Ray does not say what is free: %s", error)
        return {}
    return free


def _inventory(devices: str | Sequence[str], cores: int | None, gpus: int, threads: str | None) -> NodeInventory:
    """Take the inventory of the node on which this task runs; Ray has set the number of threads of its process."""
    os.environ.pop("OMP_NUM_THREADS", None)
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = threads
    return take_node_inventory(devices, cores, gpus)


def _nodes(known: Mapping[str, str]) -> list[_RayNode]:
    """Return the living nodes that have cores or GPUs for Ray.

    A node has the name that it was given with `--node-name`, else that of its host. Of several nodes of one name the
    second has a "-2" added, and so on.

    Args:
        known: Names that were given before -> Ray's ids of their nodes; a living node keeps its name.
    """
    import ray

    list_nodes: Any = ray.nodes
    nodes = [node for node in list_nodes() if node["Alive"] and _cpus_and_gpus(node) != (0, 0)]
    living = {node["NodeID"] for node in nodes}
    names = {id: name for name, id in known.items() if id in living}
    for node in sorted(nodes, key=lambda node: (node["NodeName"], node["NodeID"])):
        if node["NodeID"] not in names:
            given = node["NodeName"] not in ("", node["NodeManagerAddress"])
            base = str(node["NodeName"] if given else node["NodeManagerHostname"]).replace("/", "-")
            candidates = chain([base], (f"{base}-{number}" for number in count(2)))
            names[node["NodeID"]] = next(name for name in candidates if name not in names.values())
    return sorted(
        (_RayNode(names[node["NodeID"]], node["NodeID"], *_cpus_and_gpus(node)) for node in nodes),
        key=lambda node: node.name,
    )


def _cpus_and_gpus(node: Mapping[str, Any]) -> tuple[int, int]:
    return int(node["Resources"].get("CPU", 0)), int(node["Resources"].get("GPU", 0))


def _check_address(address: str | None) -> None:
    """Check that something answers at an address, which Ray would try for minutes.

    Raises:
        BackendError: Nothing does, or the address has another form.
    """
    if address in (None, "auto", "local"):
        return
    host, _, port = str(address).rpartition(":")
    if "://" in host or not host or not port.isdecimal():
        raise BackendError(
            "the address of a Ray cluster is that of its head node, such as '10.0.0.1:6379', or 'auto', got "
            f"{address!r}; the engine runs on a machine of the cluster, and not through a Ray client"
        )
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except OSError as error:
        raise BackendError(
            f"no Ray cluster answers at {address!r}: {error}; `ray start --head` prints the address of a cluster, and "
            "`ray status --address ADDRESS` checks it"
        ) from error


def _short(error: BaseException) -> str:
    """Return an error of Ray in one line: the exception of the code that Ray called, or what Ray itself says."""
    if (cause := getattr(error, "cause", None)) is not None:
        return f"{type(cause).__name__}: {cause}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
    if getattr(error, "actor_init_failed", False):  # a traceback, whose last line is the exception
        return lines[-1]
    return " ".join(lines[:2]) or type(error).__name__
