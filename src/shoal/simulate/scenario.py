"""A scenario: a cluster, the studies and jobs on it, and its changes, loaded from a TOML file."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from pathlib import Path
from typing import Annotated

from shoal.core.device import Cluster
from shoal.core.errors import ScenarioError
from shoal.plan.array_packer import ArrayPacker
from shoal.plan.packing.registry import PACKINGS, make_packing
from shoal.plan.schedule.auto import OBJECTIVES
from shoal.plan.schedule.base import Policy
from shoal.plan.schedule.registry import POLICIES, make_policy
from shoal.simulate.reader import Bounds, Table, read_toml
from shoal.simulate.run import ClusterEvent, Simulation, SimulationResult
from shoal.simulate.slowdown import SLOWDOWNS
from shoal.simulate.tables import (
    EventTable,
    FailureTable,
    JobTable,
    ModelTable,
    NodeTable,
    StudyTable,
    read_events,
    read_nodes,
)
from shoal.simulate.workload import SimulatedWorkload, TrialSource

__all__ = ["DATA", "Scenario", "ScenarioTable", "load"]

DATA = Path("../shared/data")
"""Folder of the measured tables, relative to the repository root."""


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """Settings of a scenario as a whole, with the keys of the file."""

    description: str = ""
    policies: tuple[Annotated[str, POLICIES], ...] = ("fifo", "auto")
    slowdown: Annotated[str, SLOWDOWNS] = "demands"
    objective: Annotated[str, OBJECTIVES] = "makespan"
    fuse: bool = True
    packing: Annotated[str, PACKINGS] = "cost"
    measured: bool = True
    checkpoint_every: Annotated[float, Bounds(1e-3)] = inf
    tick: Annotated[float, Bounds(0)] = 0.0


@dataclass(frozen=True, kw_only=True)
class ScenarioTable(_Settings, Table):
    """The top-level table of a file."""

    extends: str = ""
    seed: Annotated[int, Bounds(0)] = 0
    nodes: tuple[NodeTable, ...]
    models: tuple[ModelTable, ...] = ()
    studies: tuple[StudyTable, ...] = ()
    jobs: tuple[JobTable, ...] = ()
    events: tuple[EventTable, ...] = ()
    failures: FailureTable | None = None


@dataclass(frozen=True, kw_only=True)
class Scenario(_Settings):
    """All inputs of a simulation except the policy.

    Args:
        events: Changes of the cluster, with the failures that were drawn.
    """

    name: str
    cluster: Cluster
    sources: tuple[TrialSource, ...]
    events: tuple[ClusterEvent, ...] = ()
    data: Path = DATA

    def simulate(self, policy: str | Policy, directory: Path | None = None) -> SimulationResult:
        """Simulate the scenario under a policy.

        Args:
            directory: Directory for the journal of the simulated study; None: there is no journal.
        """
        searches = SimulatedWorkload(self.sources)
        structures = {structure.name: structure for structure in searches.keys.values()}
        return Simulation(
            searches,
            self.cluster,
            make_policy(policy, self.objective),
            SLOWDOWNS[self.slowdown](structures, self.data),
            events=self.events,
            packer=ArrayPacker(make_packing(self.packing)),
            fuse=self.fuse,
            measured=self.measured,
            checkpoint_seconds=self.checkpoint_every,
            tick=self.tick,
        ).run(directory, policy if isinstance(policy, str) else repr(policy))


def load(path: Path, data: Path = DATA, seed: int | None = None) -> Scenario:
    """Read a scenario file; docs/simulate.md describes it."""
    file = read_toml(path, ScenarioTable)
    seed = file.seed if seed is None else seed
    used_names: set[str] = set()
    cluster = Cluster(read_nodes(file.nodes, used_names))
    events = read_events(file.events, cluster, used_names)
    if file.failures is not None:
        events += tuple(file.failures.events(cluster, seed))
    added = (nodes for event in file.events for nodes in event.add)
    kinds = list(dict.fromkeys(each.kind for each in (*file.nodes, *added)))
    studies = [replace(each, name=each.name or f"study{index}") for index, each in enumerate(file.studies)]
    jobs = [replace(each, name=each.name or f"job{index}") for index, each in enumerate(file.jobs)]
    tables: tuple[Sequence[ModelTable | StudyTable | JobTable], ...] = (file.models, studies, jobs)
    for entries in tables:
        for index, entry in enumerate(entries):
            if entry.name in {other.name for other in entries[:index]}:
                raise entry.error("name", f"there is another {entry.name!r}; each needs a name of its own")
    models = {each.name: each.structures(kinds, data) for each in file.models}
    sources: list[TrialSource] = [search for each in studies for search in each.searches(models, data, seed)]
    sources += [each.jobs(kinds, seed) for each in jobs]
    if repeated := [name for name, times in Counter(each.name for each in sources).items() if times > 1]:
        raise file.error("studies", f"two studies or jobs are called {repeated[0]!r}; each needs a name of its own")
    if not sources:
        raise file.error("studies", "there is nothing to do; describe it under [[studies]] or [[jobs]]")
    try:
        SLOWDOWNS[file.slowdown]({each.name: each for source in sources for each in source.structures}, data)
    except ScenarioError as error:
        raise file.error("slowdown", str(error)) from error
    return Scenario(
        **{each.name: getattr(file, each.name) for each in fields(_Settings)},
        name=path.stem,
        cluster=cluster,
        sources=tuple(sources),
        events=events,
        data=data,
    )
