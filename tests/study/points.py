"""The table of points by algorithms: arguments of `tune`, the algorithms that take them, and what each point claims.

Each claim is checked by brute force on what the trials have reported.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import isclose
from statistics import fmean
from typing import Any

import numpy as np

import shoal
from shoal.algorithms.base import Algorithm
from shoal.core.job import Purpose
from shoal.core.ranking import ranked
from shoal.core.reference import ref
from shoal.core.rows import TrialRow
from shoal.core.space import Space, choice, grid, uniform
from shoal.core.trial import Report, TrialState, derive_seed
from shoal.journal.view import JournalView

COMPLETE, STOPPED = TrialState.COMPLETE, TrialState.STOPPED
EPOCHS = 4
SEED = 7

ALGORITHMS: dict[str, Callable[[], Algorithm]] = {
    "random": lambda: shoal.Random(8, EPOCHS),
    "grid": lambda: shoal.Grid(EPOCHS),
    "halving": lambda: shoal.SuccessiveHalving(8, EPOCHS, eta=2),
    "hyperband": lambda: shoal.Hyperband(EPOCHS, eta=2),
    "asha": lambda: shoal.ASHA(8, EPOCHS, eta=2, concurrency=1),
    "asha, tpe": lambda: shoal.ASHA(8, EPOCHS, eta=2, concurrency=1, sampler="tpe"),
    "pbt": lambda: shoal.PBT(6, EPOCHS, truncation=0.34),
    "median": lambda: shoal.Median(8, EPOCHS, least=2, concurrency=1),
    "optuna": lambda: shoal.OptunaSearch(8, EPOCHS, concurrency=1),
    "bohb": lambda: shoal.BOHB(EPOCHS, eta=2, concurrency=1),
    "sync_bohb": lambda: shoal.SyncBOHB(EPOCHS, eta=2),
    "asha, stopping": lambda: shoal.ASHA(8, EPOCHS, eta=2, concurrency=1, variant="stopping"),
}
"""Those that decide by the order of reports train one configuration at a time: a kill changes that order."""

BY_NUMBER = ("random", "halving", "hyperband", "asha", "asha, stopping", "median")
"""Algorithms of which trial `i` has the random configuration `i`, whatever was reported."""

MODELLING = ("asha, tpe", "optuna", "bohb", "sync_bohb")

SPACE = Space({"x": uniform(0.0, 1.0), "width": choice([6, 8])})
POINTS_OF_GRID = Space({"x": grid([0.1, 0.3, 0.5, 0.7, 0.9]), "width": grid([6, 8])})

DEPENDENT = Space(
    {
        "width": choice([6, 8]),
        "cap": uniform(0.5, 1.0),
        "x": uniform(0.0, ref("cap")),
        "low": uniform(0.0, 1.0),
        "high": uniform(0.0, 1.0),
        "area": ref("width") * ref("high"),
    },
    where=[ref("area") <= 6],
    ordered=[("low", "high")],
)
DEPENDENT_GRID = Space(
    {"width": grid([6, 8]), "x": grid([0.1, 0.3, 0.5, 0.7, 0.9]), "area": ref("width") * ref("x")},
    where=[ref("area") <= 5],
)


def course(x: Any, best_at: Any, noise: Any, epoch: Any) -> dict[str, Any]:
    """What a trial reports after an epoch, of numbers or of tensors: the larger `x`, the greater are loss and gain.

    Args:
        best_at: Epoch with the least loss.
        noise: Number in [0, 1) that the seed of the trial gives; of a fold, so much more.
    """
    return {
        "loss": x + noise / 4 + (epoch - best_at) * (epoch - best_at) / 16,
        "gain": x + noise / 8 + epoch / 64,
    }


def best_at(x: float) -> float:
    """The epoch from 1 to 4 with the least loss."""
    return 1.0 + int(EPOCHS * x)


@dataclass(frozen=True)
class Ended:
    """A study that has ended, and how it came to that.

    Args:
        arguments: Those of `tune`.
        weights: Numbers of the trials of which weights are left.
        before: The trials as they were when the study was extended; empty if it was not.
        at_once: Most trials that trained at a time; 0 if that is not known.
        live: Whether its processes were real: then a trial may report until its process knows that it is stopped.
    """

    study: shoal.Study
    name: str
    space: Space
    arguments: Mapping[str, Any]
    weights: frozenset[int]
    before: Sequence[TrialRow] = ()
    at_once: int = 0
    live: bool = False

    @cached_property
    def rows(self) -> list[TrialRow]:
        return self.study.trials

    @cached_property
    def reports(self) -> list[Report]:
        """In the order in which they were recorded."""
        with JournalView.read(self.study.directory) as journal:
            return [event for event in journal.events() if isinstance(event, Report)]

    @cached_property
    def curves(self) -> dict[int, dict[int, Mapping[str, float]]]:
        found: dict[int, dict[int, Mapping[str, float]]] = {row.number: {} for row in self.rows}
        for report in self.reports:
            if report.state is not TrialState.FAILED:
                found[report.trial][report.epoch] = report.metrics
        return found

    @cached_property
    def cut_short(self) -> frozenset[int]:
        """Numbers of the trials that were ended before they reached their targets."""
        return frozenset(row.number for row in self.rows if row.epoch < row.target)

    def sampled(self, number: int) -> Mapping[str, Any]:
        """The random configuration of a number, without initial points."""
        return self.space.sample(derive_seed(SEED, "config", number))


def outcome(ended: Ended) -> dict[str, Any]:
    """What no kill may change: everything but times, devices and jobs."""
    study = ended.study
    with JournalView.read(study.directory) as journal:
        spec, order = journal.spec, [row.number for row in ranked(journal.configurations(), study.objectives)]
    return {
        "algorithm": spec.algorithm,
        "trials": [(row.trial, row.state, row.reason) for row in ended.rows],
        "results": [
            (row.epoch, row.metrics, row.objective, row.violation, row.best_epoch, ended.curves[row.number])
            for row in ended.rows
        ],
        "ranking": order,
        "front": [row.number for row in study.pareto],
        "ended": study.ended,
        "weights": ended.weights - ended.cut_short,  # of these the last ones may not have been saved
    }


def outcome_at_targets(ended: Ended) -> dict[str, Any]:
    """What no kill changes of a live study, in which the last epoch of a trial that is cut short is left to chance."""
    found, stopped = outcome(ended), ended.cut_short
    numbers = [row.number for row in ended.rows]
    found["trials"] = [(trial, state) for trial, state, _ in found["trials"]]
    found["results"] = [each for number, each in zip(numbers, found["results"], strict=True) if number not in stopped]
    found["ranking"] = [number for number in found["ranking"] if number not in stopped]
    found["front"] = [] if stopped else found["front"]
    return found


def values(ended: Ended, row: TrialRow) -> Mapping[str, float]:
    """The values that rank a trial, by brute force: those of its best epoch, of equal ones the first, or the last."""
    curve = ended.curves[row.number]
    if ended.arguments.get("rank_by") == "last":
        return curve[max(curve)]
    return curve[best_epoch(ended, row)]


def best_epoch(ended: Ended, row: TrialRow) -> int:
    curve = ended.curves[row.number]
    return min(curve, key=lambda epoch: (violation(ended, curve[epoch]), curve[epoch]["loss"], epoch))


def violation(ended: Ended, metrics: Mapping[str, float]) -> float:
    bounds = {name: float(text.removeprefix(">= ")) for name, text in ended.arguments.get("constraints", {}).items()}
    return sum(max(0.0, bound - metrics[name]) / max(abs(bound), 1.0) for name, bound in bounds.items())


def all_ended(ended: Ended) -> None:
    assert {row.state for row in ended.rows} <= {COMPLETE, STOPPED}
    assert [row.number for row in ended.rows] == list(range(len(ended.rows)))
    if ended.name in BY_NUMBER:
        assert [row.config for row in ended.rows] == [ended.sampled(row.number) for row in ended.rows]


def initial_points_are_the_first(ended: Ended) -> None:
    given = ended.arguments["initial"]
    for row, point in zip(ended.rows[: len(given)], given, strict=True):
        assert row.config == {**row.config, **point}
    if ended.name == "grid":
        configs = [row.config for row in ended.rows]
        assert sorted(map(str, configs)) == sorted(map(str, ended.space.grid())), "no point is tried twice"
    if ended.name in (*BY_NUMBER, "pbt"):
        for row in ended.rows:
            if row.trial.origin is None:
                point = given[row.number] if row.number < len(given) else {}
                assert row.config == {**ended.sampled(row.number), **point}, "the rest is as without the points"


def repeats_share_their_configuration(ended: Ended) -> None:
    folds = ended.arguments.get("folds", 1)
    size = ended.arguments.get("repeats", 1) * folds
    configurations = ended.study.configurations
    assert len(configurations) * size == len(ended.rows)
    for index, found in enumerate(configurations):
        rows = ended.rows[index * size : (index + 1) * size]
        assert [row.config for row in rows] == [
            {**found.config, "fold": number % folds} if folds > 1 else found.config for number in range(size)
        ]
        assert len({row.seed for row in rows}) == size
        assert len({(row.state, row.epoch) for row in rows}) == 1, "the algorithm decides about all of them"
        assert found.objective is not None
        assert isclose(found.objective, fmean(values(ended, row)["loss"] for row in rows))
    assert ended.study.best_trial.objective == min(row.objective for row in configurations if row.objective is not None)


def its_timeout_has_ended_it(ended: Ended) -> None:
    with JournalView.read(ended.study.directory) as journal:
        assert [each.verb for each in journal.interventions()].count("timeout") > 0


def at_most_two_train(ended: Ended) -> None:
    with JournalView.read(ended.study.directory) as journal:
        jobs = [job for job in journal.jobs() if job.purpose is Purpose.TRAIN]
    assert max(len(array) for job in jobs for array in job.members.values()) <= 2
    assert ended.at_once <= 2


def no_trial_trains_for_longer(ended: Ended) -> None:
    """An epoch alone takes 0.2 s, so that the third report is the first after more than 0.5 s."""
    slow = [row for row in ended.rows if "trial_timeout" in row.reason]
    assert all((row.state, row.epoch - row.trial.start) == (STOPPED, 3) for row in slow)
    assert all(row.objective is not None for row in slow)
    assert all(row.epoch - row.trial.start < 3 or row.epoch == row.target for row in ended.rows if row not in slow)
    if ended.name in ("random", "grid"):
        assert len(slow) == len(ended.rows)


def the_best_epoch_ranks(ended: Ended) -> None:
    assert [row.best_epoch for row in ended.rows] == [best_epoch(ended, row) for row in ended.rows]
    assert any(row.best_epoch != row.epoch for row in ended.rows)
    values_rank(ended)


def the_last_epoch_ranks(ended: Ended) -> None:
    assert {row.best_epoch for row in ended.rows} == {None}
    values_rank(ended)


def values_rank(ended: Ended) -> None:
    losses = {row.number: values(ended, row)["loss"] for row in ended.rows}
    assert {row.number: row.objective for row in ended.rows} == losses
    assert ended.study.best_trial.number == min(losses, key=lambda number: (losses[number], number))


def the_best_keep_their_weights(ended: Ended) -> None:
    keep = ended.arguments["keep"]
    if "constraints" in ended.arguments:
        expected = {row.number for row in ended.study.pareto}
    else:
        losses = {row.number: values(ended, row)["loss"] for row in ended.rows}
        best = sorted(losses, key=lambda number: (losses[number], number))
        expected = set(best[: 1 if keep == "best" else keep])
    assert ended.weights == expected


def the_front_is_what_nothing_dominates(ended: Ended) -> None:
    ranks = {row.number: values(ended, row) for row in ended.rows}
    pairs = {number: (each["loss"], -each["gain"]) for number, each in ranks.items() if not violation(ended, each)}
    front = {
        number
        for number, (loss, cost) in pairs.items()
        if not any(other != (loss, cost) and other[0] <= loss and other[1] <= cost for other in pairs.values())
    }
    assert front
    assert {row.number for row in ended.study.pareto} == front
    if "constraints" in ended.arguments:
        feasibility_comes_first(ended)
        the_best_keep_their_weights(ended)


def feasibility_comes_first(ended: Ended) -> None:
    found = {row.number: violation(ended, values(ended, row)) for row in ended.rows}
    assert all(isclose(row.violation, found[row.number], abs_tol=1e-12) for row in ended.rows)
    if len(ended.study.objectives) == 1:
        losses = {row.number: (found[row.number], values(ended, row)["loss"], row.number) for row in ended.rows}
        best = min(losses, key=lambda number: losses[number])
        assert found[best] == 0
        assert ended.study.best_trial.number == best
        assert max(found.values()) > 0


def was_ended(ended: Ended, row: TrialRow, state: TrialState, epoch: int, reason: str) -> None:
    assert row.state is state
    assert reason in row.reason
    assert row.epoch == epoch or (ended.live and row.epoch > epoch)


def patience_completes_flat_trials(ended: Ended) -> None:
    fired = 0
    for row in ended.rows:
        losses = [ended.curves[row.number][epoch]["loss"] for epoch in sorted(ended.curves[row.number])]
        flat = [index + 1 for index in range(1, len(losses)) if losses[index] >= min(losses[:index])]
        if flat and flat[0] < EPOCHS:
            fired += 1
            was_ended(ended, row, COMPLETE, flat[0], "has not improved since epoch")
    assert fired


def a_threshold_stops_trials(ended: Ended) -> None:
    above = {
        row.number: [x for x, each in ended.curves[row.number].items() if each["loss"] > 0.9] for row in ended.rows
    }
    fired = {number: min(epochs) for number, epochs in above.items() if epochs and min(epochs) < EPOCHS}
    assert fired
    for row in ended.rows:
        if row.number in fired:
            was_ended(ended, row, STOPPED, fired[row.number], "above 0.9")


def a_percentile_stops_trials(ended: Ended) -> None:
    others: dict[int, list[float]] = {}
    best: dict[int, float] = {}
    fired: dict[int, int] = {}
    for report in ended.reports:
        if report.trial in fired:
            continue
        loss, there = report.metrics["loss"], others.setdefault(report.epoch, [])
        best[report.trial] = min(best.get(report.trial, loss), loss)
        better = sum(other < best[report.trial] for other in there)
        if len(there) >= 2 and better and better >= len(there) / 2 and report.epoch < EPOCHS:
            fired[report.trial] = report.epoch
        there.append(loss)
    assert fired
    for row in ended.rows:
        if row.number in fired:
            was_ended(ended, row, STOPPED, fired[row.number], "others had a better loss")


def a_loss_trend_stops_trials(ended: Ended) -> None:
    curves: dict[int, list[tuple[int, float]]] = {}
    fired: dict[int, tuple[int, str]] = {}
    leader, least = None, float("inf")
    for report in ended.reports:
        if report.trial in fired:
            continue
        loss = report.metrics["loss"]
        curve = curves.setdefault(report.trial, [])
        curve.append((report.epoch, loss))
        if leader is not None and len(curve) >= 3 and report.epoch < EPOCHS:
            epochs, losses = np.array(curve[-3:]).T
            lines = [(axis, np.polyfit(axis(epochs), losses, 1)) for axis in (np.log, np.positive)]
            axis, line = min(lines, key=lambda pair: np.square(np.polyval(pair[1], pair[0](epochs)) - losses).sum())
            bound = np.polyval(line, axis(EPOCHS))
            if min(bound, *(each for _, each in curve)) > least:
                fired[report.trial] = report.epoch, f"; trial {leader} has {least:.4g}"
        if loss < least:
            leader, least = report.trial, loss
    for row in ended.rows:
        if row.number in fired:
            was_ended(ended, row, STOPPED, *fired[row.number])
        else:
            assert not row.reason.startswith("loss "), row.reason


def it_ends_without_improvement(ended: Ended) -> None:
    best, at = float("inf"), -1
    stalled = None
    for number, row in enumerate(ended.rows):
        loss = values(ended, row)["loss"] if ended.curves[row.number] else float("inf")
        if loss < best:
            best, at = loss, number
        if stalled is None and number - at >= 2:
            stalled = f"the best loss has not improved for 2 trials, since trial {at}"
    if ended.name in ("random", "grid", "asha, stopping", "optuna", "median"):
        assert ended.study.ended == (stalled or "finished")
    else:  # trials that others follow may end with the search
        assert ended.study.ended in (stalled, "finished")


def earlier_trials_are_copied(ended: Ended) -> None:
    with JournalView.read(ended.study.directory) as journal:
        earlier, lines = journal.spec.earlier, journal.spec.earlier_from
    if ended.name not in MODELLING:
        assert (list(earlier), list(lines)) == ([], [])
        return
    assert len(earlier) == 8
    for trial in earlier:
        assert ended.space.faults(trial.config) == ()
        assert trial.metrics
    assert len(ended.rows) >= 6, "they do not count"


def more_trials_follow(ended: Ended) -> None:
    all_ended(ended)
    before = ended.before
    assert len(ended.rows) >= ended.arguments["extend"] > len(before)
    assert [(row.trial, row.state, row.epoch) for row in ended.rows[: len(before)]] == [
        (row.trial, row.state, row.epoch) for row in before
    ]


def configurations_are_in_the_space(ended: Ended) -> None:
    assert [ended.space.faults(row.config) for row in ended.rows] == [()] * len(ended.rows)
    assert all(row.config["area"] <= 6 for row in ended.rows)
    if ended.name != "grid":
        assert all(row.config["x"] <= row.config["cap"] for row in ended.rows)
        assert all(row.config["low"] <= row.config["high"] for row in ended.rows)
        return
    assert len(ended.rows) == 7, "of ten points the condition refuses three"


@dataclass(frozen=True)
class Point:
    """A row of the table.

    Args:
        claims: What holds of a study of these arguments, and of one that was killed.
        arguments: Of `tune`. Besides `extend`, the number of trials to which the study is extended after its end, and
            `warm_start`, which is True.
        disturbing: Arguments of the study that is killed alone: they change no result.
        live: Whether what it claims does not depend on the time that a real epoch takes.
        refused: Names of algorithms that do not take the arguments -> words of the refusal.
        space: Instead of `SPACE`; of a grid, the second one.
    """

    claims: Callable[[Ended], None]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    disturbing: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    live: bool = True
    space: tuple[Space, Space] = (SPACE, POINTS_OF_GRID)

    def space_of(self, name: str) -> Space:
        return self.space[name == "grid"]


BOTH: dict[str, Any] = {"metric": ["loss", "gain"], "mode": ["min", "max"]}
ONE_METRIC = dict.fromkeys(("median", "bohb", "sync_bohb"), "compares trials by one metric")

POINTS: dict[str, Point] = {
    "nothing else": Point(all_ended),
    "initial points": Point(
        initial_points_are_the_first, {"initial": [{"x": 0.7, "width": 8}, {"x": 0.1, "width": 6}]}
    ),
    "partial initial points": Point(
        initial_points_are_the_first, {"initial": [{"x": 0.75}, {"width": 6}]}, refused={"grid": "initial point"}
    ),
    "repeats": Point(repeats_share_their_configuration, {"repeats": 2}),
    "folds": Point(repeats_share_their_configuration, {"folds": 2}),
    "repeated folds": Point(repeats_share_their_configuration, {"repeats": 2, "folds": 2}),
    "timeout": Point(its_timeout_has_ended_it, disturbing={"timeout": 0.8}),
    "trial_timeout": Point(no_trial_trains_for_longer, {"trial_timeout": 0.5, "fuse": False}, live=False),
    "max_concurrent": Point(at_most_two_train, disturbing={"max_concurrent": 2}),
    "best epoch": Point(the_best_epoch_ranks),
    "last epoch": Point(the_last_epoch_ranks, {"rank_by": "last"}),
    "keep the best": Point(the_best_keep_their_weights, {"keep": "best"}),
    "keep three": Point(the_best_keep_their_weights, {"keep": 3}),
    "patience": Point(
        patience_completes_flat_trials, {"stop": [shoal.Patience(1)]}, refused={"pbt": "does not go with PBT"}
    ),
    "threshold": Point(a_threshold_stops_trials, {"stop": [shoal.Threshold(above=0.9)]}),
    "percentile": Point(a_percentile_stops_trials, {"stop": [shoal.Percentile(50, startup=2)], "max_concurrent": 1}),
    "loss trend": Point(
        a_loss_trend_stops_trials, {"stop": [shoal.LossTrend(warmup=0, window=3, margin=0)], "max_concurrent": 1}
    ),
    "no improvement": Point(
        it_ends_without_improvement, {"stop_after": shoal.NoImprovement(2), "max_concurrent": 1}
    ),
    "constraints": Point(feasibility_comes_first, {"constraints": {"gain": ">= 0.5"}}),
    "objectives": Point(the_front_is_what_nothing_dominates, BOTH, refused=ONE_METRIC),
    "objectives and constraints": Point(
        the_front_is_what_nothing_dominates,
        {**BOTH, "constraints": {"gain": ">= 0.4"}, "keep": "best"},
        refused=ONE_METRIC,
    ),
    "warm start": Point(earlier_trials_are_copied, {"warm_start": True}),
    "more trials": Point(
        more_trials_follow,
        {"extend": 14},
        refused={"grid": "tries every point of its space", "pbt": "cannot try more trials"},
    ),
    "dependent values": Point(configurations_are_in_the_space, space=(DEPENDENT, DEPENDENT_GRID)),
}  # fmt: skip
