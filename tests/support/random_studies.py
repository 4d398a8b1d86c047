"""Random studies from a seed: search space, devices, costs and reports of the trials."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from shoal.algorithms.asha import ASHA
from shoal.algorithms.base import Algorithm
from shoal.algorithms.bohb import BOHB, SyncBOHB
from shoal.algorithms.grid import Grid
from shoal.algorithms.hyperband import Hyperband
from shoal.algorithms.median import Median
from shoal.algorithms.optuna_search import OptunaSearch
from shoal.algorithms.pbt import PBT
from shoal.algorithms.random import Random
from shoal.algorithms.successive_halving import SuccessiveHalving
from shoal.core.array import FusionKey
from shoal.core.demand import Profile
from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import DeviceError
from shoal.core.space import Space, choice, grid, uniform
from shoal.core.trial import Report, Trial, TrialState, derive_seed
from shoal.plan.schedule.registry import POLICIES
from shoal.run.virtual import Workload

__all__ = [
    "KEEPS",
    "ORDER_INDEPENDENT",
    "POLICY_NAMES",
    "UNLIMITED_RETRIES",
    "RandomStudy",
    "RandomWorkload",
    "random_study",
]

ORDER_INDEPENDENT = (Grid, Hyperband, PBT, Random, SuccessiveHalving, SyncBOHB)
"""Algorithms whose results do not depend on the order of the reports of different trials. BOHB is none: its brackets
overlap, so that the model of a later one knows what was reported until then."""

UNLIMITED_RETRIES = 100
"""Number of retries that exceeds the number of faults of any study."""

_MB = 2**20
POLICY_NAMES = sorted(POLICIES)
"""Policies of random studies."""
KEEPS: Sequence[int | str] = ("all", "best", 1, 3)
"""Rules by which weights are kept."""
GROWING = ["auto", "water_filling"] * 3
"""Policies that give jobs several devices, which random studies have more often."""


@dataclass(frozen=True)
class RandomWorkload(Workload):
    """Trials without work, whose reports follow from their configuration, the epoch and a seed.

    Args:
        seed: Seed of the randomness.
        profiles: (structure, kind of device) -> profile there.
        failure_period: One in `failure_period` trials fails at some epoch, in spite of retries.
        last_failing_epoch: Last epoch at which such a trial fails.
    """

    seed: int
    profiles: Mapping[tuple[str, str], Profile]
    failure_period: int
    last_failing_epoch: int

    def key(self, trial: Trial) -> FusionKey:
        """Return the key of a trial; trials of one width can share an array."""
        return FusionKey(f"net {trial.config['width']}", "data", 32, order=trial.data_seed)

    def profile(self, key: FusionKey, kind: str) -> Profile:
        """Return the invented profile."""
        return self.profiles[key.structure, kind]

    def report(self, trial: Trial, epoch: int) -> Report:
        """Return a report with a falling loss; some trials have no number as a loss at some epoch."""
        noise = derive_seed(self.seed, "noise", trial.number, epoch) / 2**63
        metrics = {"loss": float(trial.config["x"]) + noise / epoch, "size": 1.0 - trial.config["x"] + noise / 2}
        if self._fails(trial, epoch) == "by itself":
            return Report(trial.number, epoch, metrics, 0.0, TrialState.FAILED, f"no loss at epoch {epoch}")
        return Report(trial.number, epoch, metrics)

    def error(self, trial: Trial, epoch: int) -> str:
        """Return the exception of a trial whose code raises; "" for others."""
        raises = self._fails(trial, epoch) == "raises"
        return f"ValueError: trial {trial.number} at epoch {epoch}" if raises else ""

    def _fails(self, trial: Trial, epoch: int) -> str:
        """Return the kind of failure of a trial in an epoch; "" without one."""
        draw = derive_seed(self.seed, "fails", trial.number)
        if (
            not self.failure_period
            or draw % self.failure_period
            or epoch != trial.start + 1 + draw // self.failure_period % self.last_failing_epoch
        ):
            return ""
        return "raises" if draw // self.failure_period // self.last_failing_epoch % 2 else "by itself"


@dataclass(frozen=True)
class RandomStudy:
    """A study without faults.

    Args:
        seed: Seed of the study.
        goals: Metric, mode and constraints, as `bind` takes them.
        algorithm: Factory of its bound algorithm.
        cluster: Devices of the study.
        policy: Name of the policy.
        workload: Trials of the study.
        fuse: Whether trials may share an array.
        checkpoint_seconds: Seconds between two checkpoints of a trial.
        elastic: Whether the members of a running job can change.
        retries: Number of retries of a trial whose job failed; `UNLIMITED_RETRIES` exceeds the number of faults.
        timeout: Seconds after which it ends, once, and continues without a timeout; None: never.
        max_concurrent: Most trials that train at a time.
        keep: Which ended trials keep their weights.
    """

    seed: int
    goals: Mapping[str, Any]
    algorithm: Callable[[], Algorithm]
    cluster: Cluster
    policy: str
    workload: RandomWorkload
    fuse: bool
    checkpoint_seconds: float
    elastic: bool
    retries: int
    timeout: float | None = None
    max_concurrent: int | None = None
    keep: int | str = "all"

    def find(self, devices: str | Sequence[str]) -> Cluster:
        """Return the devices of these names.

        Raises:
            DeviceError: one is missing.
        """
        if missing := set(devices) - {device.name for _, device in self.cluster}:
            raise DeviceError(f"device {min(missing)!r} is not there")
        return self.cluster.select(lambda device: device.name in devices)

    def results_without_faults(
        self, extensions: Sequence[int] = ()
    ) -> dict[int, tuple[Mapping[str, object], TrialState, int]]:
        """Return the end of each trial without faults: number -> configuration, state and epochs.

        Args:
            extensions: Numbers of trials to which users extended the search, one after the other.
        """
        algorithm, epochs = self.algorithm(), dict[int, int]()
        for extension in extensions:
            algorithm.extend(extension)
        trials: dict[int, Trial] = {}
        states: dict[int, TrialState] = {}
        while groups := algorithm.next_groups(1):
            for trial, target in [(trial, group.budget.epochs) for group in groups for trial in group.trials]:
                trials[trial.number] = trial
                for report in self._reports(trial, epochs.get(trial.number, trial.start), target):
                    epochs[trial.number], states[trial.number] = report.epoch, report.state
                    states.update((decision.trial, decision.state) for decision in algorithm.observe(report))
        return {number: (trial.config, states[number], epochs[number]) for number, trial in trials.items()}

    def _reports(self, trial: Trial, start: int, target: int) -> list[Report]:
        """Return the reports of a trial after epoch `start` up to `target`, or up to its failure."""
        reports: list[Report] = []
        for epoch in range(start + 1, target + 1):
            if reason := self.workload.error(trial, epoch):
                return [*reports, Report(trial.number, epoch - 1, state=TrialState.FAILED, reason=reason)]
            report = self.workload.report(trial, epoch)
            if report.state is TrialState.FAILED:
                return [*reports, report]
            state = TrialState.PAUSED if epoch == target else TrialState.RUNNING
            reports.append(Report(trial.number, epoch, report.metrics, state=state))
        return reports


def random_study(seed: int) -> RandomStudy:
    """Return the random study of a seed."""
    rng, budgets = random.Random(f"study {seed}"), random.Random(f"budgets {seed}")
    widths = [1, 2, 3][: rng.randint(1, 3)]
    kinds = ["cpu/1" if seed % 2 else "small", "large"][: rng.randint(1, 2)]
    profiles = {(f"net {width}", kind): _profile(rng, width, kind) for width, kind in product(widths, kinds)}
    make, searches_grid = _algorithm(rng)
    xs = [round(rng.random(), 3) for _ in range(rng.randint(2, 4))]
    space = Space({"x": grid(xs) if searches_grid else uniform(0.0, 1.0), "width": choice(widths)})
    if searches_grid:
        space = Space({"x": grid(xs), "width": grid(widths)})
    data_seed = rng.choice([0, 0, None])
    goals = _goals(seed, several=make().takes_several_metrics)

    def algorithm() -> Algorithm:
        made = make()
        made.bind(space, **goals, seed=seed, data_seed=data_seed)
        return made

    return RandomStudy(
        seed,
        goals,
        algorithm,
        _cluster(rng, kinds),
        rng.choice([*POLICY_NAMES, *GROWING]),
        RandomWorkload(seed, profiles, failure_period=rng.choice([0, 0, 5, 10]), last_failing_epoch=3),
        fuse=rng.random() < 0.85,
        checkpoint_seconds=rng.choice([0.0, 0.5, 5.0]),
        elastic=rng.random() < 0.8,
        retries=rng.choice([UNLIMITED_RETRIES, UNLIMITED_RETRIES, UNLIMITED_RETRIES, 2]),
        timeout=budgets.choice([None, None, 2.0, 20.0]),
        max_concurrent=budgets.choice([None, None, 1, 3, 8]),
        keep=random.Random(f"keep {seed}").choice(KEEPS),
    )


def _algorithm(rng: random.Random) -> tuple[Callable[[], Algorithm], bool]:
    """Return a factory of an algorithm, and whether it searches a grid."""
    n, epochs = rng.randint(2, 10), rng.randint(1, 4)
    many = rng.choice([epochs, 12])  # enough to try a job on several devices
    factories: Sequence[Callable[[], Algorithm]] = [
        lambda: Grid(many),
        lambda: Random(n, many),
        lambda: SuccessiveHalving(max(n, 3), 3 * epochs, eta=3),
        lambda: Hyperband(3 + epochs, eta=3),
        lambda: ASHA(n, 3 + epochs, eta=2, concurrency=4),
        lambda: Median(n, epochs + 1, least=2, concurrency=4),
        lambda: PBT(max(n, 3), many + 1, truncation=0.4, explored=["x"]),
        lambda: SyncBOHB(3 + epochs, eta=3),
        lambda: BOHB(3 + epochs, eta=3),
        lambda: OptunaSearch(n, epochs, concurrency=4),
    ]
    make = rng.choice(factories)
    return make, make is factories[0]


def _goals(seed: int, *, several: bool) -> dict[str, Any]:
    """Return what the trials of a study are compared by: half of the studies have one metric and no constraint."""
    rng = random.Random(f"goals {seed}")
    constraints = rng.choice([{}, {}, {"size": "<= 0.6"}])
    if several and rng.random() < 0.25:
        return {"metric": ["loss", "size"], "mode": ["min", "min"], "constraints": constraints}
    return {"metric": "loss", "mode": "min", "constraints": constraints}


def _profile(rng: random.Random, width: int, kind: str) -> Profile:
    """Return the profile of a structure on a kind of device."""
    step = rng.uniform(0.02, 0.1) * width * (0.5 if kind == "large" else 1.0)
    epoch_steps = rng.choice([rng.randint(2, 10), rng.randint(40, 100)])
    gain = rng.choice([1.0, 4.0, 12.0])  # of 16 members at once
    return Profile(
        {1: step, 16: 16 * step / gain},
        epoch_steps=epoch_steps,
        validation_steps=1,
        base_memory=rng.randint(0, 100) * _MB,
        member_memory=rng.randint(10, 100) * _MB * width,
        compute=rng.choice([0.2, 0.5, 1.0]),
        cores=rng.choice([0.5, 1.0]),
        mixing=rng.choice([None, 1.0, 1.5]),
        spreading=rng.choice([{2: 0.6}, {2: 0.6, 3: 0.5}, {2: 0.6, 3: 0.9}, {2: 1.2}]),
        sample_sharing=rng.choice(["resident", "resident", "kept", "batch"]),
        fetch_seconds=0.0,
    )


def _cluster(rng: random.Random, kinds: Sequence[str]) -> Cluster:
    """Return one or two nodes; each device has memory for one trial of any structure, at least."""
    nodes = []
    for number in range(rng.randint(1, 2)):
        names = [f"gpu:{number}{index}" for index in range(rng.randint(1, 3))]
        devices = (Device(name, rng.choice(kinds), rng.choice([400, 600, 1200]) * _MB) for name in names)
        nodes.append(Node(f"node-{number}", rng.choice([1.0, 2.0, 4.0]), tuple(devices)))
    return Cluster(tuple(nodes))
