"""Three nodes of a Ray cluster on this machine, with a CPU slot each, and what may happen to a study there."""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import psutil
from ray.cluster_utils import Cluster

from invented.faults import Faults, LiveRun
from shoal.run.nodes.link import LEASE_SECONDS

__all__ = ["ADDRESS", "NodeFaults", "three_nodes"]

ADDRESS = "INVENTED_ADDRESS"
"""The variable that names the address of the cluster."""

NAMES = ("ash", "beech", "cedar")
SOON = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""Ray notices a dead node within seconds."""


@contextmanager
def three_nodes() -> Iterator[Cluster]:
    """The cluster; processes that are started within know its address."""
    head, *others = NAMES
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "node_name": head, "_system_config": SOON})
    try:
        for name in others:
            cluster.add_node(num_cpus=1, node_name=name)
        os.environ[ADDRESS] = cluster.address
        yield cluster
    finally:
        cluster.shutdown()


class NodeFaults(Faults):
    """Does faults to a run on the cluster.

    Args:
        draw: decides whom they strike.
        cluster: of the run.
    """

    def __init__(self, draw: random.Random, cluster: Cluster) -> None:
        super().__init__(draw)
        self._cluster = cluster

    def _worker_is_killed(self, run: LiveRun) -> frozenset[str] | None:
        workers = _workers(run)
        job = self.draw.choice(sorted(workers)) if workers else ""
        with suppress(KeyError, psutil.NoSuchProcess):
            workers[job].kill()
            return frozenset({job})
        return None

    def _agent_is_killed(self, run: LiveRun) -> frozenset[str] | None:
        agents = [each for each in psutil.Process().children(recursive=True) if "ray::RayAgent" in _line(each)]
        with suppress(IndexError, psutil.NoSuchProcess):
            agent = self.draw.choice(agents)
            below = {each.pid for each in agent.children(recursive=True)}
            agent.kill()
            return frozenset(job for job, worker in _workers(run).items() if worker.pid in below)
        return None

    def _node_is_killed(self, run: LiveRun) -> frozenset[str] | None:
        """Another one of its name comes at once."""
        node = self.draw.choice(sorted(self._cluster.worker_nodes, key=lambda node: node.node_id))
        name = node._ray_params.node_name
        struck = frozenset(job for job, running in run.jobs().items() if running.device.startswith(f"{name}/"))
        self._cluster.remove_node(node, allow_graceful=False)
        self._cluster.add_node(num_cpus=1, node_name=name)
        return struck

    def _engine_is_frozen(self, run: LiveRun) -> frozenset[str] | None:
        """For longer than the lease of the agents, which then end their jobs."""
        struck = frozenset(run.jobs())
        run.process.send_signal(signal.SIGSTOP)
        time.sleep(LEASE_SECONDS + 5.0)
        run.process.send_signal(signal.SIGCONT)
        return struck

    kinds: ClassVar[dict[str, Callable[[Any, LiveRun], frozenset[str] | None]]] = {
        "worker killed": _worker_is_killed,
        "agent killed": _agent_is_killed,
        "node killed": _node_is_killed,
        "engine frozen": _engine_is_frozen,
        "engine killed": Faults._engine_is_killed,
    }


def _workers(run: LiveRun) -> dict[str, psutil.Process]:
    """Id of each job of a run -> its process, wherever that is."""
    found = {}
    for each in psutil.process_iter():
        with suppress(OSError):
            log = Path(os.readlink(f"/proc/{each.pid}/fd/1"))
            if log.parent == run.directory / "logs" and log.name.startswith("job-"):
                found[log.stem] = each
    return found


def _line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
