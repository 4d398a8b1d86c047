"""The back end "ray": Ray Core starts an agent on each node of a cluster, and carries the calls to it."""

import logging
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import chain, count
from typing import TYPE_CHECKING, Any, ClassVar

from shoal.core.command import BackendCommand
from shoal.core.device import Cluster
from shoal.core.errors import BackendError
from shoal.core.job import WorkerContext
from shoal.run.launcher import begin_imports, imported_libraries
from shoal.run.nodes.agent import Agent
from shoal.run.nodes.backend import Nodes
from shoal.run.nodes.inventory import NodeInventory, check_nodes, cluster_of, devices_on, take_node_inventory
from shoal.run.nodes.link import Carrier, NodeGone, NodeUnreachable
from shoal.run.nodes.messages import AgentSetup, MessageBatch, ProcessSettings

if TYPE_CHECKING:
    from shoal.run.nodes.slurm_cluster import ClusterHead

__all__ = [
    "Ray",
    "RayAgent",
    "RayNode",
    "check_address",
    "check_ray",
    "is_address_of",
    "living_nodes",
]

_log = logging.getLogger("shoal.run")

_CONNECT_SECONDS = 5.0
"""Longest wait for a TCP connection to the address of a cluster; Ray itself tries for minutes."""
_INVENTORY_SECONDS = 60.0
"""Longest wait for the inventory of a node, whose process imports Shoal."""
_WATCH_SECONDS = 1.0
"""Seconds between two looks at Ray's list of nodes; Ray sends no events of nodes."""

_ANSWER_SECONDS = 5.0
"""Longest wait for the answer of an agent after its own time."""
_CLOSE_SECONDS = 15.0
"""Longest wait for an agent to end its jobs."""
_RESERVE_SECONDS = 1
"""Longest wait for a reservation before the actor is called; Ray takes whole seconds."""


@dataclass(frozen=True)
class RayNode:
    """A living node of the cluster."""

    name: str
    id: str
    cpus: int
    gpus: int
    labels: Mapping[str, str] = field(default_factory=dict, compare=False)


class RayAgent:
    """The actor of a node: a process of Ray's that runs the agents of the driver's studies, one after another.

    It reserves nothing, so it starts while others use the node, and is kept between studies; the jobs of an agent run
    within a reservation of the carrier.
    """

    def __init__(self) -> None:
        self._agents: dict[str, Agent] = {}  # id of a run -> its agent; at most one

    def inventory(
        self,
        process: ProcessSettings,
        libraries: Sequence[str],
        devices: str | Sequence[str],
        cores: int | None,
        gpus: int,
    ) -> NodeInventory:
        """Find the node's devices; meanwhile the server of its workers imports torch, and libraries of the driver."""
        process.apply()
        begin_imports(WorkerContext.runner, libraries)
        return take_node_inventory(devices, cores, gpus)

    def begin(self, setup: AgentSetup) -> None:
        """Begin the agent of a run, whose `setup.probe` is its id; an agent of another run is ended."""
        for run in list(self._agents):
            self.close(run)
        setup.process.apply()
        self._agents[setup.probe] = Agent(setup)

    def post(self, run: str, first: int, commands: Sequence[BackendCommand]) -> None:
        """As `Agent.post`; a call of a run that has ended is ignored."""
        if (agent := self._agents.get(run)) is not None:
            agent.post(first, commands)

    def fetch(self, run: str, acknowledged: int, timeout: float) -> MessageBatch:
        """As `Agent.fetch`; nothing comes for a run that has ended or has not begun."""
        agent = self._agents.get(run)
        return MessageBatch(1, (), 0) if agent is None else agent.fetch(acknowledged, timeout)

    def close(self, run: str) -> None:
        """End all jobs of a run."""
        if (agent := self._agents.get(run)) is not None:
            agent.close()
            self._agents.pop(run, None)


class NodeActors:
    """The actors of this driver that serve no study now, by node.

    An actor is started for the inventory of a node, becomes its agent, and is kept for the next study of this process.
    Ray ends it with this process.
    """

    def __init__(self) -> None:
        self._idle: dict[tuple[str, str], Any] = {}  # (job of this driver, id of a node) -> actor

    def take(self, node: RayNode) -> Any:
        """An actor on a node, which the caller has alone: one that is idle, or a new one."""
        return self._idle.pop(self._key(node), None) or self._start(node)

    def give_back(self, node: RayNode, actor: Any) -> None:
        """Keep an actor for the next study; end it if there is one on the node already."""
        import ray

        if self._idle.setdefault(self._key(node), actor) is not actor:
            ray.kill(actor)

    def inventories(self, settings: Mapping[RayNode, str | Sequence[str]], seconds: float) -> dict[str, NodeInventory]:
        """Inventories by name of nodes with these settings of `discover`; BackendError if one cannot run Shoal."""
        import ray

        process, libraries = ProcessSettings.of_this_process(), imported_libraries()

        def ask(node: RayNode, actor: Any) -> tuple[Any, Any]:
            return actor, actor.inventory.remote(process, libraries, settings[node], node.cpus or None, node.gpus)

        asked = {node: ask(node, self.take(node)) for node in settings}
        found: dict[str, NodeInventory] = {}
        for node, (actor, answer) in asked.items():
            try:
                try:
                    found[node.name] = ray.get(answer, timeout=seconds)
                except ray.exceptions.RayActorError:  # it was killed, a kept one perhaps since the last study
                    actor, answer = ask(node, self._start(node))
                    found[node.name] = ray.get(answer, timeout=seconds)
            except ray.exceptions.RayError as error:
                raise BackendError(
                    f"node {node.name} of the Ray cluster cannot run Shoal: {_short(error)}; all nodes need the same "
                    "versions of Python, torch and Shoal"
                ) from error
            self.give_back(node, actor)
        return found

    @staticmethod
    def _key(node: RayNode) -> tuple[str, str]:
        import ray

        return ray.get_runtime_context().get_job_id(), node.id

    @staticmethod
    def _start(node: RayNode) -> Any:
        """Start an actor; it has a thread for commands and one for messages: else a stop may overtake its start."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as OnNode

        remote: Any = ray.remote
        actor = remote(concurrency_groups={"commands": 1, "messages": 1})(RayAgent)
        return actor.options(num_cpus=0, max_restarts=0, scheduling_strategy=OnNode(node.id, soft=False)).remote()


class RayCarrier(Carrier):
    """Carries calls to the agent of a node, which begins when Ray has reserved all CPUs and GPUs there.

    The reservation is a placement group of one bundle. It waits until other programs have given back what they hold,
    and ends with the carrier, or with this process.
    """

    def __init__(self, setup: AgentSetup, node: RayNode, actors: NodeActors) -> None:
        from ray.util.placement_group import placement_group

        self._setup = setup
        self._node = node
        self._actors = actors
        self._actor = actors.take(node)
        bundle = {name: float(count) for name, count in (("CPU", node.cpus), ("GPU", node.gpus)) if count}
        self._reservation: Any = placement_group(
            [bundle],
            strategy="STRICT_PACK",
            name=f"shoal-{setup.probe}-{node.id}",
            bundle_label_selector=[{"ray.io/node-id": node.id}],
        )
        self._begun = False
        self._answer: Any = None  # of a fetch that has not come so far
        self._ended: Any = None
        self._closed = False

    def post(self, first: int, commands: Sequence[BackendCommand]) -> None:
        """Call the actor; Ray keeps the call until it is connected."""
        self._actor.post.options(concurrency_group="commands").remote(self._setup.probe, first, list(commands))

    def fetch(self, acknowledged: int, timeout: float) -> MessageBatch:
        """Call the actor; an answer that is late is waited for again, and not called for twice."""
        import ray

        reserved = self._begun or self._reservation.wait(_RESERVE_SECONDS)
        try:
            if reserved and not self._begun:
                ray.get(self._actor.begin.remote(self._setup), timeout=_CLOSE_SECONDS)
                self._begun = True
            if self._answer is None:
                fetch = self._actor.fetch.options(concurrency_group="messages")
                self._answer = fetch.remote(self._setup.probe, acknowledged, timeout)
            batch: MessageBatch = ray.get(self._answer, timeout=timeout + _ANSWER_SECONDS)
        except ray.exceptions.GetTimeoutError as error:
            raise NodeUnreachable("no answer") from error
        except ray.exceptions.ActorUnavailableError as error:
            self._answer = None
            raise NodeUnreachable(_short(error)) from error
        except ray.exceptions.RayError as error:
            raise NodeGone(_short(error), bool(getattr(error, "actor_init_failed", False))) from error
        self._answer = None
        if not reserved:  # the call has shown that the node is there
            raise NodeUnreachable("Ray has not reserved the node")
        return batch

    def end(self) -> None:
        """Call the actor."""
        self._ended = self._actor.close.remote(self._setup.probe)

    def close(self) -> None:
        """Wait for the end of the agent's jobs, give back the reservation, and keep the actor if it has answered."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if self._closed:
            return
        self._closed = True
        keep = False
        with suppress(ray.exceptions.RayError):  # it has ended already, or takes too long: then it is killed
            if self._ended is not None:
                ray.get(self._ended, timeout=_CLOSE_SECONDS)
                keep = True
        if keep:
            self._actors.give_back(self._node, self._actor)
        else:
            ray.kill(self._actor)
        remove_placement_group(self._reservation)


def waiting_text(node: str) -> str:
    """What Ray has free on a node, given by Ray's id, and which actors and reservations of others are there."""
    free = _from_ray("what is free", lambda state: state.available_resources_per_node()).get(node)
    groups = _from_ray("its reservations", lambda state: state.placement_group_table(None)).values()
    actors = _from_ray("its actors", lambda state: state.actor_table(None)).values()
    there = [
        f"placement group {each['name'] or each['placement_group_id']!r}"
        for each in groups
        if each["state"] == "CREATED" and node in each["bundles_to_node_id"].values()
    ]
    there += sorted(_actor_text(each) for each in actors if each["State"] == "ALIVE" and _node_of(each) == node)
    text = "" if free is None else f"; free are {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs"
    return (
        f"Ray has not reserved it: its agent needs all CPUs and GPUs that Ray has there{text}; there are "
        f"{', '.join(there) or 'no actors and placement groups, so tasks hold the others'}; more says: ray list actors"
    )


def _node_of(actor: Mapping[str, Any]) -> str:
    """The node of an actor; "" for an idle or waiting agent, which holds nothing."""
    return "" if actor["ActorClassName"] == RayAgent.__name__ else str(actor["Address"]["NodeID"])


def _actor_text(actor: Mapping[str, Any]) -> str:
    name = f" {actor['Name']!r}" if actor["Name"] else ""
    return f"actor {actor['ActorClassName']}{name} of job {actor['JobID']}, process {actor['Pid']}"


def _from_ray(what: str, ask: Callable[[Any], Any]) -> Mapping[str, Any]:
    """A table of Ray's state; nothing if Ray, which has no public function for it, fails."""
    import ray

    try:
        private: Any = ray._private
        table: Mapping[str, Any] = ask(private.state.state)
    except (AttributeError, RuntimeError, ray.exceptions.RayError) as error:
        _log.info("Ray does not say %s: %s", what, error)
        return {}
    return table


def _short(error: BaseException) -> str:
    """An error of Ray in one line: the exception of the code that Ray called, or what Ray itself says."""
    if (cause := getattr(error, "cause", None)) is not None:
        return f"{type(cause).__name__}: {cause}"
    lines = [line.strip() for line in str(error).splitlines() if line.strip() and not line.startswith("\t")]
    if getattr(error, "actor_init_failed", False):  # a traceback, whose last line is the exception
        return lines[-1]
    return " ".join(lines[:2]) or type(error).__name__


class Ray(Nodes):
    """Runs jobs on the nodes of a Ray cluster, by an agent on each.

    All cores and GPUs that Ray has on a node are reserved by a placement group before its agent begins, so the agent
    waits until other programs of the cluster have given them back, and no two studies use one node. Ray ends the
    agents and the reservations when the engine's process has ended. With devices="auto", a cluster with GPUs has no
    agents on its other nodes.
    """

    nodes_return = True

    _connected_by: ClassVar[tuple[str, str]] = ("", "")
    """The address that this process connected by, and the cluster's own."""
    _actors: ClassVar[NodeActors] = NodeActors()
    _head: ClassVar["ClusterHead | None"] = None
    """The head that back end "slurm" has started in this process."""

    def __init__(self, worker_context: WorkerContext) -> None:
        super().__init__(worker_context)
        self._ids: dict[str, str] = {}  # node with an agent -> Ray's id of the node
        self._only_gpus = worker_context.devices == "auto" and _have_gpus(living_nodes({}))
        self._watched = float("-inf")
        self._waiting: dict[str, str] = {}  # node -> text of its wait since the last look
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
        check_ray("ray")
        import ray

        cls.leave_head()
        if ray.is_initialized():
            connected = ray.get_runtime_context().gcs_address
            if cls._head is not None and cls._head.alive:
                raise BackendError(
                    f"this process is connected to the Ray cluster at {connected!r} of back end 'slurm', and back end "
                    "'ray' uses one of yours; call ray.shutdown() first"
                )
            if not is_address_of(ray_address, connected, cls._connected_by):
                raise BackendError(
                    f"this process is connected to the Ray cluster at {connected!r}, so it cannot use {ray_address!r}; "
                    "call ray.shutdown() first"
                )
            return
        address = ray_address or os.environ.get("RAY_ADDRESS") or None
        check_address(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.WARNING)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise BackendError(
                f"no connection to the Ray cluster at {address or 'this machine'!r}: {error}; look at: ray status"
            ) from error
        cls._connected_by = (address or "", ray.get_runtime_context().gcs_address)

    @classmethod
    def leave_head(cls) -> None:
        """Restore the user's settings of Ray if ray.shutdown() has ended the cluster that back end "slurm" started."""
        if Ray._head is not None:
            import ray

            if not ray.is_initialized():
                Ray._head.close()
                Ray._head = None

    @classmethod
    def discover(cls, devices: str | Sequence[str]) -> Cluster:
        """Find devices on all nodes of the cluster, which must have the same versions."""
        return cls.find_on(living_nodes({}), devices)

    @classmethod
    def find_on(cls, nodes: Sequence[RayNode], devices: str | Sequence[str]) -> Cluster:
        """Find devices on nodes, which must have the same versions."""
        check_nodes([node.name for node in nodes], devices)
        only_gpus = devices == "auto" and _have_gpus(nodes)
        settings = {node: devices_on(node.name, devices) for node in nodes if node.gpus or not only_gpus}
        settings = {node: setting for node, setting in settings.items() if setting != []}
        found = cls._actors.inventories(settings, _INVENTORY_SECONDS)
        return cluster_of(found, devices)

    def nodes(self) -> Sequence[RayNode]:
        """The nodes of the study that are there now; those that have an agent keep their names."""
        return living_nodes(self._ids)

    def look_for_nodes(self) -> None:
        """Start agents on nodes that have none, at most every second."""
        if time.monotonic() < self._watched + _WATCH_SECONDS:
            return
        self._watched = time.monotonic()
        self._waiting.clear()
        draining = _from_ray("which nodes are about to end", lambda state: state.get_draining_nodes())
        for node in self.nodes():
            if node.id in draining:
                self.drain(node.name, "Ray was told so, by SIGTERM to `ray start` for example")
                continue
            mine = (node.gpus or not self._only_gpus) and devices_on(node.name, self.worker_context.devices) != []
            if mine and self.usable(node.name):
                self._ids[node.name] = node.id
                setup = self.setup(node.name, node.cpus or None, node.gpus)
                self.add_node(node.name, RayCarrier(setup, node, self._actors))

    def waiting_reason(self, node: str) -> str:
        """Return what Ray has free on a node, all of which an agent needs, and who is there."""
        if node not in self._waiting:
            self._waiting[node] = waiting_text(self._ids.get(node, ""))
        return self._waiting[node]


def check_ray(backend: str) -> None:
    """Check that Ray is installed, which a back end of this name needs."""
    if find_spec("ray") is None:
        raise BackendError(f"back end {backend!r} needs Ray, which is not installed. Install it with: pip install ray")


def is_address_of(address: str | None, connected: str, connected_by: tuple[str, str]) -> bool:
    """Whether an address that a user gives stands for the cluster that this process is connected to.

    `connected_by` is the address that the process connected by, and that of its cluster then; another one may have been
    connected to in between.
    """
    return address in (None, "auto", connected) or (address, connected) == connected_by


def living_nodes(known: Mapping[str, str]) -> list[RayNode]:
    """The living nodes that have cores or GPUs for Ray.

    A node has the name that it was given with `--node-name`, else that of its host. Of several nodes of one name the
    second has a "-2" added, and so on.
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
        (RayNode(names[node["NodeID"]], node["NodeID"], *_cpus_and_gpus(node), node["Labels"]) for node in nodes),
        key=lambda node: node.name,
    )


def _have_gpus(nodes: Sequence[RayNode]) -> bool:
    return any(node.gpus for node in nodes)


def _cpus_and_gpus(node: Mapping[str, Any]) -> tuple[int, int]:
    return int(node["Resources"].get("CPU", 0)), int(node["Resources"].get("GPU", 0))


def check_address(address: str | None) -> None:
    """Check that something answers at an address, which Ray would try for minutes."""
    if address in (None, "auto", "local"):
        return
    host, _, port = str(address).rpartition(":")
    if "://" in host or not host or not port.isdecimal() or int(port) > 65535:
        raise BackendError(
            "the address of a Ray cluster is that of its head node, such as '10.0.0.1:6379', or 'auto', got "
            f"{address!r}; the engine runs on a machine of the cluster, and not through a Ray client"
        )
    try:
        socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: the name is none of a host
        raise BackendError(
            f"no Ray cluster answers at {address!r}: {error}; `ray start --head` prints the address of a cluster, and "
            "`ray status --address ADDRESS` checks it"
        ) from error
