"""The tables of a scenario file: nodes, models, studies, jobs, events; docs/simulate.md describes their keys."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from inspect import signature
from itertools import count
from pathlib import Path
from random import Random
from types import MappingProxyType
from typing import Annotated, Any

from shoal.algorithms.registry import ALGORITHMS
from shoal.core.demand import Profile
from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import AlgorithmError, ScenarioError
from shoal.core.trial import derive_seed
from shoal.host.toml_file import unknown_name_text
from shoal.plan.cost.cost import Cost
from shoal.plan.cost.history import History, environment
from shoal.plan.cost.scaling import Scaling
from shoal.run.virtual import START_SECONDS
from shoal.simulate.reader import Bounds, Table
from shoal.simulate.run import ClusterEvent
from shoal.simulate.slowdown import read_curves
from shoal.simulate.workload import (
    Curves,
    ListedJobs,
    PowerLawCurves,
    RecordedCurves,
    SimulatedModel,
    SimulatedStudy,
    read_task,
)

__all__ = [
    "EventTable",
    "FailureTable",
    "JobTable",
    "ModelTable",
    "NodeTable",
    "StudyTable",
    "profile_of_costs",
    "read_events",
    "read_nodes",
]

GB = 10**9
DAY = 86_400
MAX_COUNT = 10**6
"""Limit of devices, jobs or epochs of one table."""
_UNLIMITED_CORES = 10**6
"""Cores of a device: a job may use all cores of its node."""
_DIGEST_LENGTH = 8
"""Number of digits of a digest in an error."""

Amount = Annotated[float, Bounds(0)]
Fraction = Annotated[float, Bounds(0, 1)]
Positive = Annotated[float, Bounds(1e-6)]
Count = Annotated[int, Bounds(1, MAX_COUNT)]
Factor = Annotated[float, Bounds(1)]
Width = Annotated[int, Bounds(1, 1000)]
Setting = Annotated[int, Bounds(0, MAX_COUNT)] | Annotated[float, Bounds(0, MAX_COUNT)] | bool | str


@dataclass(frozen=True, kw_only=True)
class NodeTable(Table):
    """[[nodes]]: `count` equal machines."""

    kind: str
    devices: Annotated[int, Bounds(1, 100)]
    memory_gb: Amount
    name: str = ""
    count: Annotated[int, Bounds(1, 10_000)] = 1
    cores: Amount = 64.0
    oversubscription: Positive = 1.0


def read_nodes(tables: Iterable[NodeTable], used_names: set[str]) -> tuple[Node, ...]:
    """Make the nodes, with their names or node0, node1, ...; add their names to `used_names`, the names so far."""
    nodes: list[Node] = []
    for table in tables:
        memory, ratio = int(table.memory_gb * GB), table.oversubscription
        device = Device("", table.kind, memory, cores=_UNLIMITED_CORES, oversubscription=ratio)
        free_names = (name for number in count(len(nodes)) if (name := f"node{number}") not in used_names)
        for index in range(table.count):
            name = table.name + str(index) * (table.count > 1) if table.name else next(free_names)
            node = Node(name, table.cores, tuple(replace(device, name=f"{name}/{i}") for i in range(table.devices)))
            if conflicts := used_names & _devices_by_name(node).keys():
                raise table.error(
                    "name", f"there is or was a node or device {min(conflicts)!r}; each needs its own name"
                )
            used_names.update(_devices_by_name(node))
            nodes.append(node)
    return tuple(nodes)


def _devices_by_name(node: Node) -> dict[str, tuple[str, ...]]:
    """Return the devices by the names of a node and of its devices."""
    names = tuple(device.name for device in node.devices)
    return {node.name: names, **{name: (name,) for name in names}}


def profile_of_costs(
    seconds: float,
    compute: float,
    memory: int,
    cores: float,
    fused: Mapping[int, float],
    fused_compute: Mapping[int, float] = MappingProxyType({}),
) -> Profile:
    """Make the profile of a structure from the costs of one trial.

    Args:
        seconds: Seconds of an epoch.
        compute: Fraction of a device.
        memory: Memory, in bytes.
        fused: Time of an epoch of an array as a multiple of that of one trial, by number of members.
        fused_compute: Fraction of a device that an array needs, by number of members; by default that of one trial.
    """
    fractions = {1: compute, **fused_compute} if fused_compute else {}
    steps = {1: seconds, **{members: seconds * factor for members, factor in fused.items()}}
    return Profile(
        steps,
        1,
        0,
        base_memory=0,
        member_memory=memory,
        compute=compute,
        cores=cores,
        mixing=1.0,
        share_speeds={members: {fraction: 1.0} for members, fraction in fractions.items()},
        measured_members=MAX_COUNT,
    )


def _scaled_profile(base_profile: Profile, factor: float) -> Profile:
    steps = {members: seconds * factor for members, seconds in base_profile.step_seconds.items()}
    return replace(base_profile, step_seconds=steps)


@dataclass(frozen=True, kw_only=True)
class ModelTable(Table):
    """[[models]]: the costs of a trial of a model, for each batch size.

    Either `epoch_seconds`, `compute` and `memory_gb`, each one number or one for each batch size. Or `workloads`, a row
    of `a100_mig_slices.csv` for each batch size, and `samples`, the length of an epoch: its compute is the measured SM
    utilisation alone, which HyperSack's sampler records. Or `profile`, the name of a measured profile. `kinds` are the
    speeds of devices, `fused` the times of arrays, `fused_compute` their fractions of a device, by number of members.
    """

    name: str
    batch_sizes: tuple[Annotated[int, Bounds(1, 10**9)], ...] = (1,)
    epoch_seconds: tuple[Amount, ...] | None = None
    compute: tuple[Fraction, ...] | None = None
    memory_gb: tuple[Amount, ...] | None = None
    cores: tuple[Amount, ...] | None = None
    workloads: tuple[str, ...] = ()
    samples: Annotated[int, Bounds(1)] | None = None
    profile: str | None = None
    kinds: Mapping[str, Positive] = field(default_factory=dict)
    fused: Mapping[str, Positive] = field(default_factory=dict)
    fused_compute: Mapping[str, Fraction] = field(default_factory=dict)

    def structures(self, kinds: Sequence[str], data: Path) -> list[SimulatedModel]:
        """Return a structure for each batch size, on a cluster of these kinds of devices."""
        if self.profile is not None:
            return self._measured_structures(self.profile, kinds)
        fused, fused_compute = (self._per_members(key) for key in ("fused", "fused_compute"))
        _check_kinds(self, self.kinds, kinds)
        workloads = self._per_batch_size("workloads", [""])
        curves = read_curves(data) if self.workloads else {}
        for workload in self.workloads:
            if workload not in curves:
                raise self.error("workloads", unknown_name_text("workload", workload, curves))
        rows = [curves[workload] for workload in workloads if workload]
        epochs = [self.samples / size for size in self.batch_sizes] if self.samples else []
        seconds = self._per_batch_size("epoch_seconds", [n * row.seconds for n, row in zip(epochs, rows, strict=False)])
        compute = self._per_batch_size("compute", [row.utilisation for row in rows])
        memory = self._per_batch_size("memory_gb", [row.memory / GB for row in rows])
        cores = self._per_batch_size("cores", [1.0])
        structures = []
        for i, size in enumerate(self.batch_sizes):
            base_profile = profile_of_costs(seconds[i], compute[i], int(memory[i] * GB), cores[i], fused, fused_compute)
            profiles = {
                kind: _scaled_profile(base_profile, 1 / self.kinds.get(kind, 1.0)) for kind in self.kinds or kinds
            }
            structures.append(SimulatedModel(f"{self.name} x {size}", profiles, workloads[i]))
        return structures

    def _per_members(self, key: str) -> dict[int, float]:
        values: Mapping[str, float] = getattr(self, key)
        for name in values:
            if not (name.isdecimal() and 2 <= int(name) <= MAX_COUNT):
                raise self.error(key, f"`{key}` must name numbers of members from 2 to {MAX_COUNT:,}, got {name!r}")
        return {int(name): value for name, value in values.items()}

    def _per_batch_size(self, key: str, default: Sequence[Any]) -> Sequence[Any]:
        """Return the values of a key for all batch sizes, by default those computed from other keys."""
        values: tuple[Any, ...] = tuple(getattr(self, key) or default)
        sizes = len(self.batch_sizes)
        if not values:
            raise self.error(key, f"`{key}` is missing in `models`, or `workloads` and `samples`, or `profile`")
        if len(values) not in (1, sizes):
            raise self.error(key, f"`{key}` must be one, or {sizes}, one for each batch size, got {len(values)}")
        return values * sizes if len(values) == 1 else values

    def _measured_structures(self, asked: str, kinds: Sequence[str]) -> list[SimulatedModel]:
        """Return measured structures; speeds of other kinds are relative to the measured kind, the first by name."""
        if self != ModelTable(place=self.place, name=self.name, profile=asked, kinds=self.kinds):
            raise self.error("profile", "beside a `profile` there may be `name` and `kinds`; the rest was measured")
        structure, _, data = asked.partition("/")
        known = sorted(History(environment=environment()).all().items())
        matching = [each for each in known if each[0][0].startswith(structure) and each[0][1].startswith(data)]
        if (names := len({key[:2] for key, _ in matching})) != 1:
            listed = [
                f"\n  {key[0][:_DIGEST_LENGTH]}/{key[1][:_DIGEST_LENGTH]}: batch size {key[2]} on {key[3]}, "
                f"{1000 * Cost(found).step_seconds(1):.3g} ms a step, {found.epoch_steps} steps an epoch"
                for key, found in matching or known
            ]
            fault = f"{names} profiles begin with {asked!r}" if matching else f"there is no profile {asked!r}"
            raise self.error("profile", f"{fault}; the job history of this environment has {''.join(listed) or 'none'}")
        sizes: dict[int, dict[str, Profile]] = {}
        for (_, _, size, kind), found in matching:
            sizes.setdefault(size, {})[kind] = found
        measured = sorted({key[3] for key, _ in matching})
        if not {*measured, *self.kinds} & {*kinds}:
            fault = f"it was measured on {', '.join(measured)}, the devices are {', '.join(kinds)}"
            raise self.error("profile", f'{fault}; say how fast they are: kinds = {{ "{kinds[0]}" = 2.0 }}')
        structures = []
        for size, base_profile in sizes.items():
            others = {
                kind: _scaled_profile(base_profile[min(base_profile)], 1 / speed) for kind, speed in self.kinds.items()
            }
            structures.append(SimulatedModel(f"{self.name} x {size}", others | base_profile))
        return structures


def _check_kinds(table: Table, named: Iterable[str], kinds: Sequence[str]) -> None:
    """Refuse kinds without a device in the cluster."""
    if named and not {*named} & {*kinds}:
        raise table.error("kinds", f"no device is one of {', '.join(named)}; the devices are {', '.join(kinds)}")


@dataclass(frozen=True, kw_only=True)
class Range(Table):
    """A range from which an amount is drawn uniformly."""

    low: Amount
    high: Amount


@dataclass(frozen=True, kw_only=True)
class FractionRange(Range):
    """A range of fractions of a device."""

    low: Fraction
    high: Fraction


RandomFraction = FractionRange | tuple[Fraction, ...]
RandomAmount = Range | tuple[Amount, ...]


def _draw(amount: RandomAmount, rng: Random) -> float:
    if isinstance(amount, Range):
        if amount.low > amount.high:
            raise amount.error("high", f"`high` must be at least `low`, {amount.low:g}, got {amount.high:g}")
        return rng.uniform(amount.low, amount.high)
    return amount[0] if len(amount) == 1 else rng.choice(amount)


@dataclass(frozen=True, kw_only=True)
class _CostTable(Table):
    """Costs of all jobs of a study, or of one [[jobs]]."""

    alpha: Factor | None = None
    beta: Factor = 1.0
    max_jobs: Width = 1
    max_devices: Width = 1
    start_seconds: Amount = START_SECONDS
    switch_seconds: Amount | None = None

    def with_costs(self, structure: SimulatedModel, name: str) -> SimulatedModel:
        """Return a structure with these costs under another name."""
        scaling = Scaling(Scaling.alpha if self.alpha is None else self.alpha, self.beta)
        crowding = {jobs: scaling.factor(1 / jobs) for jobs in range(2, self.max_jobs + 1)}
        spreading = {width: scaling.factor(width) for width in range(2, self.max_devices + 1)}
        profiles = {
            kind: replace(each, crowding=crowding or each.crowding, spreading=spreading or each.spreading)
            for kind, each in structure.profiles.items()
        }
        switch = self.start_seconds if self.switch_seconds is None else self.switch_seconds
        return SimulatedModel(name, profiles, structure.workload, self.alpha, self.start_seconds, switch)


@dataclass(frozen=True, kw_only=True)
class CurvesTable(Table):
    """`curves` of a study: recorded curves of TaskSet, of which `good` reach the target."""

    task: Annotated[int, Bounds(0)]
    good: Annotated[int, Bounds(0)] | None = None


@dataclass(frozen=True, kw_only=True)
class StudyTable(_CostTable):
    """[[studies]]: `count` searches; with `epochs` a grid of every model, batch size and learning rate.

    The epochs and the arrival of each search are drawn if several are given.
    """

    name: str = ""
    count: Count = 1
    models: tuple[str, ...] = ()
    learning_rates: Count = 1
    epochs: tuple[Count, ...] | None = None
    algorithm: Mapping[str, Setting] | None = None
    curves: CurvesTable | None = None
    arrival: RandomAmount = (0.0,)

    def searches(
        self, models: Mapping[str, Sequence[SimulatedModel]], data: Path, seed: int
    ) -> Iterator[SimulatedStudy]:
        """Yield the searches over the models of this study, with the seed of the scenario."""
        chosen = self.models or tuple(models)
        for model in chosen:
            if model not in models:
                raise self.error("models", unknown_name_text("model", model, models))
        if len(set(chosen)) < len(chosen) or not chosen:
            raise self.error("models", f"a study needs a model, and each once, got {', '.join(chosen) or 'none'}")
        structures = [structure for model in chosen for structure in models[model]]
        for number in range(self.count):
            name = f"{self.name} {number}" if self.count > 1 else self.name
            yield self._search(name, structures, data, derive_seed(seed, "study", name))

    def _search(self, study: str, structures: Sequence[SimulatedModel], data: Path, seed: int) -> SimulatedStudy:
        """Return the search of this name over the structures, with a seed of its own."""
        rng = Random(derive_seed(seed, "draws"))
        name, settings = self._settings(rng)
        trials, epochs = settings.get("n", len(structures) * self.learning_rates), settings.get("epochs", 1)
        if self.count * trials * epochs > 10 * MAX_COUNT:
            of_all = f"{self.count} times " if self.count > 1 else ""
            total = f"{of_all}{trials:,} trials of {epochs:,} epochs are {self.count * trials * epochs:,} epochs in all"
            raise self.error("learning_rates", f"{total}; at most {10 * MAX_COUNT:,} can be simulated")
        curves: Curves = PowerLawCurves()
        if self.curves is not None:
            try:
                curves = RecordedCurves(read_task(data, self.curves.task), seed, settings.get("n"), self.curves.good)
            except ScenarioError as error:
                raise self.error("curves", str(error)) from error
        own_structures = [self.with_costs(each, f"{study}: {each.name}") for each in structures]
        arrivals = (_draw(self.arrival, rng),)
        return SimulatedStudy(study, own_structures, self.learning_rates, (name, settings), arrivals, curves, seed)

    def _settings(self, rng: Random) -> tuple[str, dict[str, Any]]:
        """Return the name and the settings of the algorithm of one search."""
        if (self.algorithm is None) == (self.epochs is None):
            raise self.error("epochs", "give either `epochs`, for a grid, or `algorithm = { name = ... }`")
        grid = {"name": "grid", "epochs": rng.choice(self.epochs)} if self.epochs else {}
        settings: dict[str, Any] = {**(self.algorithm or grid)}
        name, place = settings.pop("name", None), self.place / "algorithm"
        if name is None:
            raise place.error("`name` is missing in `algorithm`")
        if name not in ALGORITHMS:
            raise (place / "name").error(unknown_name_text("algorithm", name, ALGORITHMS))
        known = signature(ALGORITHMS[name]).parameters
        for key in settings.keys() - known.keys():
            raise (place / key).error(unknown_name_text("setting", key, known))
        try:
            ALGORITHMS[name](**settings)
        except (AlgorithmError, TypeError) as error:
            raise place.error(f"algorithm {name!r} cannot be made: {error}") from error
        return name, settings


@dataclass(frozen=True, kw_only=True)
class JobTable(_CostTable):
    """[[jobs]]: `count` jobs without a search; amounts are drawn if several are given.

    `seconds` is the time of all `epochs` together.
    """

    seconds: RandomAmount
    compute: RandomFraction = (1.0,)
    memory_gb: RandomAmount = (0.0,)
    cores: RandomAmount = (1.0,)
    arrival: RandomAmount = (0.0,)
    name: str = ""
    count: Count = 1
    epochs: Count = 1
    kinds: tuple[str, ...] = ()
    group: str = ""
    workload: str = ""

    def jobs(self, kinds: Sequence[str], seed: int) -> ListedJobs:
        """Return the jobs, drawn with the seed of the scenario, on a cluster of these kinds of devices."""
        _check_kinds(self, self.kinds, kinds)
        rng = Random(derive_seed(seed, "jobs", self.name))
        structures, arrivals = [], []
        for number in range(self.count):
            amounts = (self.seconds, self.compute, self.memory_gb, self.cores, self.arrival)
            seconds, compute, memory, cores, arrival = (_draw(amount, rng) for amount in amounts)
            base_profile = profile_of_costs(seconds / self.epochs, compute, int(memory * GB), cores, {})
            structure = SimulatedModel("", dict.fromkeys(self.kinds or kinds, base_profile), self.workload)
            structures.append(self.with_costs(structure, f"{self.name}/{number}"))
            arrivals.append(arrival)
        return ListedJobs(self.name, structures, arrivals, self.group, epochs=self.epochs)


@dataclass(frozen=True, kw_only=True)
class EventTable(Table):
    """[[events]]: names of nodes or devices that fail, are restored or removed, and added nodes."""

    at: Amount
    fail: tuple[str, ...] = ()
    restore: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    add: tuple[NodeTable, ...] = ()

    def named_devices(self, key: str, devices: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
        """Return the devices that a key names, themselves or by their nodes; `devices` are those of each name."""
        names: tuple[str, ...] = getattr(self, key)
        for name in names:
            if name not in devices:
                raise self.error(key, f"at {self.at:g} s {unknown_name_text('node or device', name, devices)}")
        return tuple(device for name in names for device in devices[name])


def read_events(tables: Iterable[EventTable], cluster: Cluster, used_names: set[str]) -> tuple[ClusterEvent, ...]:
    """Return the changes of a cluster in the order of time; `used_names` is that of `read_nodes`."""
    devices = {name: own for node in cluster.nodes for name, own in _devices_by_name(node).items()}
    events: list[ClusterEvent] = []
    for table in sorted(tables, key=lambda table: table.at):
        failed, restored, removed = (table.named_devices(key, devices) for key in ("fail", "restore", "remove"))
        event = ClusterEvent(table.at, failed, restored, removed, read_nodes(table.add, used_names))
        if event == ClusterEvent(table.at):
            raise table.error("at", "nothing happens; say what fails, is restored, removed or added")
        devices = {name: own for name, own in devices.items() if not set(own) & set(removed)}
        devices |= {name: own for node in event.added for name, own in _devices_by_name(node).items()}
        events.append(event)
    return tuple(events)


_MOST_FAILURES = 1_000_000


@dataclass(frozen=True, kw_only=True)
class FailureTable(Table):
    """[failures]: each node that is there at the start fails at random for so many `days`, and is repaired each time.

    The times between failures are exponential, as of a Poisson process, and drawn from the seed of the scenario.
    """

    per_thousand_node_days: Positive
    repair_seconds: Amount
    days: Annotated[float, Bounds(0, 10_000)]

    def events(self, cluster: Cluster, seed: int) -> list[ClusterEvent]:
        """Return the failures and repairs of the nodes of a cluster."""
        expected = len(cluster.nodes) * self.days * self.per_thousand_node_days / 1000
        if expected > _MOST_FAILURES:
            raise ScenarioError(
                f"[failures] means {expected:.3g} failures, and at most {_MOST_FAILURES} can be simulated; lower "
                "`per_thousand_node_days` or `days`"
            )
        mean_seconds = 1000 * DAY / self.per_thousand_node_days
        events: list[ClusterEvent] = []
        for node in cluster.nodes:
            rng = Random(derive_seed(seed, "failures", node.name))
            devices = tuple(device.name for device in node.devices)
            at = rng.expovariate(1 / mean_seconds)
            while at < self.days * DAY:
                repaired = at + self.repair_seconds
                events += [ClusterEvent(at, failed=devices), ClusterEvent(repaired, restored=devices)]
                at = repaired + rng.expovariate(1 / mean_seconds)
        return events
