"""The back end "ray": Ray Core starts an agent on each node of a cluster, and carries the calls to it."""

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import chain, count
from typing import Any, ClassVar

from shoal.backends.base import WorkerContext
from shoal.backends.nodes.backend import Nodes
from shoal.backends.nodes.inventory import check_nodes, cluster_of, devices_on
from shoal.backends.nodes.link import LEASE_SECONDS
from shoal.backends.nodes.ray_agents import NodeActors, RayCarrier, RayNode, waiting_text
from shoal.core.device import Cluster
from shoal.core.errors import BackendError

__all__ = ["Ray", "is_address_of"]

_log = logging.getLogger("shoal.backends")

_CONNECT_SECONDS = 5.0
"""Longest wait for a TCP connection to the address of a cluster; Ray itself tries for minutes."""
_INVENTORY_SECONDS = 60.0
"""Longest wait for the inventory of a node, whose process imports Shoal."""
_WATCH_SECONDS = 3.0
"""Seconds between two looks at Ray's list of nodes; Ray sends no events of nodes."""


class Ray(Nodes):
    """Runs jobs on the nodes of a Ray cluster, by an agent on each.

    All cores and GPUs that Ray has on a node are reserved by a placement group before its agent begins, so the agent
    waits until other programs of the cluster have given them back, and no two studies use one node. Ray ends the
    agents and the reservations when the engine's process has ended. With devices="auto", a cluster with GPUs has no
    agents on its other nodes.

    Args:
        worker_context: Context of the workers of the study.
        lease: As for `Nodes`.

    Raises:
        BackendError: This process cannot be connected to a cluster.
    """

    nodes_return = True

    _connected_by: ClassVar[tuple[str, str]] = ("", "")
    """The address that this process connected by, and the cluster's own."""
    _actors: ClassVar[NodeActors] = NodeActors()
    """The actors that wait for the next study of this process."""

    def __init__(self, worker_context: WorkerContext, lease: float = LEASE_SECONDS) -> None:
        self.connect()
        super().__init__(worker_context, lease)
        self._ids: dict[str, str] = {}  # node with an agent -> Ray's id of the node
        self._only_gpus = worker_context.devices == "auto" and _have_gpus(_nodes({}))
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
        if find_spec("ray") is None:
            raise BackendError("back end 'ray' needs Ray, which is not installed. Install it with: pip install ray")
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
        nodes = _nodes({})
        check_nodes([node.name for node in nodes], devices)
        only_gpus = devices == "auto" and _have_gpus(nodes)
        settings = {node: devices_on(node.name, devices) for node in nodes if node.gpus or not only_gpus}
        settings = {node: setting for node, setting in settings.items() if setting != []}
        found = cls._actors.inventories(settings, _INVENTORY_SECONDS)
        return cluster_of(found, devices)

    def look_for_nodes(self) -> None:
        """Start agents on nodes that have none, at most every few seconds."""
        if time.monotonic() < self._watched + _WATCH_SECONDS:
            return
        self._watched = time.monotonic()
        self._waiting.clear()
        for node in _nodes(self._ids):
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


def is_address_of(address: str | None, connected: str, connected_by: tuple[str, str]) -> bool:
    """Return whether an address that a user gives stands for the cluster that this process is connected to.

    Args:
        address: As for `Ray.connect`.
        connected: Address of the cluster, as Ray says.
        connected_by: The address that the process connected by, and that of its cluster then; another one may have
            been connected to in between.
    """
    return address in (None, "auto", connected) or (address, connected) == connected_by


def _nodes(known: Mapping[str, str]) -> list[RayNode]:
    """Return the living nodes that have cores or GPUs for Ray.

    A node has the name that it was given with `--node-name`, else that of its host. Of several nodes of one name the
    second has a "-2" added, and so on."""
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
        (RayNode(names[node["NodeID"]], node["NodeID"], *_cpus_and_gpus(node)) for node in nodes),
        key=lambda node: node.name,
    )


def _have_gpus(nodes: Sequence[RayNode]) -> bool:
    return any(node.gpus for node in nodes)


def _cpus_and_gpus(node: Mapping[str, Any]) -> tuple[int, int]:
    return int(node["Resources"].get("CPU", 0)), int(node["Resources"].get("GPU", 0))


def _check_address(address: str | None) -> None:
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
