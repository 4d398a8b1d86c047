"""A scenario: a cluster, what is to be done on it, and what happens to it."""

from dataclasses import dataclass
from math import inf
from pathlib import Path

from shoal.core.device import Cluster
from shoal.core.errors import ScenarioError
from shoal.planner.grouping import Grouping
from shoal.planner.packing.registry import PACKINGS, make_packing
from shoal.schedule.auto import OBJECTIVES
from shoal.schedule.base import Policy
from shoal.schedule.oversubscription import OversubscriptionTuner
from shoal.schedule.registry import POLICIES, make_policy
from shoal.simulate.elements import read_events, read_jobs, read_models, read_nodes, read_studies
from shoal.simulate.outcome import Outcome
from shoal.simulate.reader import read_toml
from shoal.simulate.run import ClusterEvent, Simulation
from shoal.simulate.search import Searches, Source
from shoal.simulate.slowdown import SLOWDOWNS

__all__ = ["DATA", "Scenario", "load"]

DATA = Path("../shared/data")
"""Folder of the measured tables, relative to the repository root, where commands are run."""


@dataclass(frozen=True)
class Scenario:
    """All that a simulation needs but the policy.

    Args:
        name: of the file.
        description: in a line or two.
        cluster: at the start.
        sources: where trials come from.
        events: changes of the cluster.
        slowdown: name of the slow-down model.
        policies: that are compared unless others are asked for.
        objective: what counts, a name of `OBJECTIVES` and property of `Outcome`.
        fuse: whether trials may share an array.
        packing: name of what decides which arrays share a process.
        measured: see `Simulation`.
        checkpoint_every: seconds between two checkpoints of a job.
        tick: see `Simulation`.
        data: folder of the measured tables.
        tuned: kinds of devices whose oversubscription is found while a simulation runs.
    """

    name: str
    description: str
    cluster: Cluster
    sources: tuple[Source, ...]
    events: tuple[ClusterEvent, ...]
    slowdown: str
    policies: tuple[str, ...]
    objective: str
    fuse: bool
    packing: str
    measured: bool
    checkpoint_every: float
    tick: float
    data: Path
    tuned: tuple[str, ...] = ()

    def simulate(self, policy: str | Policy) -> Outcome:
        """What comes of a policy.

        Raises:
            PolicyError: there is no such policy, or it made an illegal plan.
            ScenarioError: a table is not there, or knows nothing of a job.
        """
        searches = Searches(self.sources)
        structures = {structure.name: structure for structure in searches.keys.values()}
        return Simulation(
            searches,
            self.cluster,
            make_policy(policy, self.objective),
            SLOWDOWNS[self.slowdown](structures, self.data),
            events=self.events,
            tuner=OversubscriptionTuner(kinds=self.tuned),
            grouping=Grouping(make_packing(self.packing)),
            fuse=self.fuse,
            measured=self.measured,
            checkpoint_seconds=self.checkpoint_every,
            tick=self.tick,
        ).run()


def load(path: Path, data: Path = DATA, seed: int | None = None) -> Scenario:
    """Read a scenario file; docs/simulate.md describes it.

    Args:
        path: of the TOML file.
        data: folder of the measured tables.
        seed: counts instead of the file's own.

    Raises:
        ScenarioError: it cannot be simulated; the error names the file, the line, the key and the nearest valid one.
    """
    top = read_toml(path)
    description = top.take("description", (str,), "")
    slowdown = top.one_of("slowdown", SLOWDOWNS, "demands")
    policies = top.names("policies") or ("fifo", "auto")
    for policy in policies:
        if policy not in POLICIES:
            top.fail("policies", f"there is no policy {policy!r}; there are {', '.join(POLICIES)}")
    objective = top.one_of("objective", OBJECTIVES, "makespan")
    own_seed = top.whole("seed", 0)
    seed = own_seed if seed is None else seed
    fuse, measured = top.take("fuse", (bool,), True), top.take("measured", (bool,), True)
    packing = top.one_of("packing", PACKINGS, "cost")
    tick = top.number("tick", 0.0)
    checkpoint_every = top.number("checkpoint_every", inf, least=1e-3)
    dilation = 1 + top.number("checkpoint_seconds", 0.0) / checkpoint_every
    tables = {name: top.tables(name) for name in ("nodes", "models", "studies", "jobs", "events")}
    top.done()
    tuned: dict[str, bool] = {}
    names: set[str] = set()
    cluster = Cluster(read_nodes(tables["nodes"], tuned, names))
    events = read_events(tables["events"], cluster, tuned, names)
    possible = (*cluster.nodes, *(node for event in events for node in event.added))
    kinds = list(dict.fromkeys(device.kind for _, device in Cluster(possible)))
    if not kinds:
        raise ScenarioError(f"{path} has no devices; describe them under [[nodes]]")
    models = read_models(tables["models"], kinds, data)
    sources = (
        *read_studies(tables["studies"], models, data, seed, dilation),
        *read_jobs(tables["jobs"], kinds, seed, dilation),
    )
    if not sources:
        raise ScenarioError(f"{path} has nothing to do; describe it under [[studies]] or [[jobs]]")
    return Scenario(
        name=path.stem,
        description=description,
        cluster=cluster,
        sources=sources,
        events=events,
        slowdown=slowdown,
        policies=policies,
        objective=objective,
        fuse=fuse,
        packing=packing,
        measured=measured,
        checkpoint_every=checkpoint_every,
        tick=tick,
        data=data,
        tuned=tuple(kind for kind, is_tuned in tuned.items() if is_tuned),
    )
