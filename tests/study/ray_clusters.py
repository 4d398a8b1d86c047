"""Ray clusters of several nodes, all on this machine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray.cluster_utils import Cluster

from shoal.run.nodes.ray import Ray

SOON = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
"""Ray notices a dead node within seconds."""


@contextmanager
def clustered(*names: str) -> Iterator[Cluster]:
    """A cluster whose nodes have one CPU each; this process is connected to it."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    head, *others = names
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "node_name": head, "_system_config": SOON})
    try:
        for name in others:
            made.add_node(num_cpus=1, node_name=name)
        connect(made)
        yield made
    finally:
        ray.shutdown()
        made.shutdown()


def connect(cluster: Cluster) -> None:
    """Connect this process to a cluster, and to no other."""
    if ray.is_initialized():
        ray.shutdown()
    Ray.connect(cluster.address)
