"""Results of a trial do not depend on the other members: each epoch of each trial is compared with a plain loop."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tasks
from plain import array_sizes, check_equal, check_plain, curves, plain_loop, rounding, tune

import shoal
from shoal.algorithms.base import Problem
from shoal.core.space import Space
from shoal.core.trial import derive_seed

RATES = [1e-4 * 1000 ** (number / 31) for number in range(32)]
FEW_RATES = shoal.grid([0.003, 0.01, 0.03, 0.1])


@pytest.fixture(scope="module")
def rates(pytestconfig: pytest.Config) -> list[float]:
    """Those of the benchmark; in a fast run some of the calm ones, which are the same to the last digits."""
    return RATES if pytestconfig.getoption("thorough") else RATES[:20:8]


@pytest.fixture(scope="module")
def epochs(pytestconfig: pytest.Config) -> int:
    """Those of the benchmark, or some."""
    return 10 if pytestconfig.getoption("thorough") else 3


@pytest.fixture(scope="module")
def reference(rates: list[float], epochs: int) -> tuple[dict[int, Any], dict[int, Any]]:
    """The trials of the benchmark in a plain loop, and how far another order of rounding takes that.

    At rates above 0.02 training is chaotic: torch's own two implementations of Adam are 1e-6 apart after ten epochs.
    """
    problem = Problem(Space({"lr": shoal.grid(rates)}), "accuracy", "max", 0, derive_seed(0, "data"))
    trials = [problem.trial(number, config) for number, config in enumerate(problem.space.grid())]
    plain = {trial.number: plain_loop(tasks.Digits(), trial, epochs) for trial in trials}
    calm = {number: dict.fromkeys(range(1, epochs + 1), 0.0) for number in plain}
    chaotic = [trial for trial in trials if trial.config["lr"] > 0.008]
    other = {trial.number: plain_loop(tasks.FusedDigits(), trial, epochs) for trial in chaotic}
    return plain, calm | {number: rounding(plain[number], curve) for number, curve in other.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "devices"), [pytest.param("inline", "cpu:1", marks=pytest.mark.thorough), ("local", "cpu:2")]
)
def test_a_search_is_as_many_plain_loops_as_it_has_trials(
    backend: str,
    devices: str,
    rates: list[float],
    epochs: int,
    reference: tuple[dict[int, Any], dict[int, Any]],
    tmp_path: Path,
) -> None:
    space = {"lr": shoal.grid(rates)}
    algorithm = shoal.Grid(epochs)
    study = tune(tasks.Digits(), space, tmp_path / "study", algorithm=algorithm, backend=backend, devices=devices)
    check_equal(curves(study.directory), *reference)
    assert {str(row.state) for row in study.trials} == {"complete"}


@pytest.mark.in_turns(5)
@pytest.mark.usefixtures("fusing_pays")
@pytest.mark.parametrize(
    ("task", "space", "fused"),
    [
        pytest.param(tasks.Blobs(), {"lr": FEW_RATES}, [4], id="adam"),
        pytest.param(
            tasks.Momentum(),
            {"lr": FEW_RATES, "momentum": shoal.grid([0.5, 0.9]), "step_size": shoal.grid([1, 3])},
            [16],
            id="momentum and StepLR",
        ),
        pytest.param(tasks.Plateau(), {"lr": FEW_RATES}, [4], id="ReduceLROnPlateau"),
        pytest.param(tasks.Convolutional(), {"lr": FEW_RATES}, [4], id="CNN with BatchNorm"),
        pytest.param(
            tasks.Mixed(),
            {
                "lr": shoal.grid([0.01, 0.03]),
                "width": 4,
                "batch_size": shoal.grid([8, 16]),
                "tanh": shoal.grid([False, True]),
                "noise": shoal.grid([0.3, 0.6]),
            },
            [2] * 8,
            id="structures, batch sizes and data",
        ),
        pytest.param(tasks.OwnStep(), {"lr": FEW_RATES}, [4], id="own step"),
        pytest.param(tasks.Adversarial(), {"lr": FEW_RATES}, [4], id="two optimizers"),
        pytest.param(tasks.AdversarialOneByOne(), {"lr": FEW_RATES}, [4], id="two optimizers, one by one"),
        pytest.param(tasks.RmsProp(), {"lr": FEW_RATES}, [4], id="an optimizer without a rule"),
        pytest.param(tasks.Named(), {"lr": FEW_RATES}, [4], id="batches that are dicts"),
    ],
)
def test_every_trial_equals_a_plain_loop(
    task: shoal.Task, space: Mapping[str, Any], fused: list[int], tmp_path: Path
) -> None:
    study = tune(task, space, tmp_path / "study")
    check_plain(study, task)
    assert array_sizes(study.directory) == fused


@pytest.mark.usefixtures("fusing_pays")
def test_trials_with_their_own_order_of_samples_equal_plain_loops(tmp_path: Path) -> None:
    study = tune(tasks.Blobs(), {"lr": FEW_RATES}, tmp_path / "study", data_seed="trial")
    check_plain(study, tasks.Blobs())
    assert len({row.trial.data_seed for row in study.trials}) == 4
    assert array_sizes(study.directory) == [1] * 4


@pytest.mark.in_turns(5)
@pytest.mark.usefixtures("fusing_pays")
@pytest.mark.parametrize("scheduler", ["multistep", "lambda", "onecycle", "cosine", "sequential"])
def test_promoted_trials_go_on_where_they_stopped_with_any_scheduler(scheduler: str, tmp_path: Path) -> None:
    space = {"lr": shoal.loguniform(0.003, 0.3), "scheduler": scheduler}
    algorithm = shoal.Hyperband(max_epochs=9, eta=3, brackets=1)
    study = tune(tasks.Scheduled(), space, tmp_path / "study", algorithm=algorithm)
    assert sorted(row.epoch for row in study.trials) == [1] * 6 + [3] * 2 + [9]
    check_plain(study, tasks.Scheduled())


@pytest.mark.parametrize(
    ("backend", "devices"), [pytest.param("inline", "cpu:1", marks=pytest.mark.thorough), ("local", "cpu:2")]
)
def test_promoted_trials_equal_plain_loops_without_a_stop(backend: str, devices: str, tmp_path: Path) -> None:
    space = {"lr": shoal.loguniform(0.003, 0.3), "momentum": shoal.uniform(0.0, 0.9), "step_size": shoal.choice([2, 3])}
    algorithm = shoal.Hyperband(max_epochs=9, eta=3)
    study = tune(tasks.Momentum(), space, tmp_path / "study", algorithm=algorithm, backend=backend, devices=devices)
    check_plain(study, tasks.Momentum())
    assert max(row.epoch for row in study.trials) == 9


@pytest.mark.in_turns(5)
@pytest.mark.usefixtures("fusing_pays")
@pytest.mark.parametrize(
    ("task", "space"),
    [
        pytest.param(
            tasks.Dropout(),
            {"lr": shoal.grid([0.01, 0.1]), "dropout": shoal.grid([0.2, 0.5]), "decay": shoal.grid([0.0, 0.1])},
            id="dropout and AdamW",
        ),
        pytest.param(tasks.Augmented(), {"lr": FEW_RATES}, id="random samples, layers and metrics"),
        pytest.param(tasks.AugmentedOwnStep(), {"lr": FEW_RATES}, id="the same by an own step"),
        pytest.param(tasks.Adversarial(noisy=True), {"lr": FEW_RATES}, id="random inputs of a generator"),
        pytest.param(tasks.AdversarialOneByOne(noisy=True), {"lr": FEW_RATES}, id="the same, one by one"),
    ],
)
def test_random_numbers_are_the_trials_own(task: shoal.Task, space: Mapping[str, Any], tmp_path: Path) -> None:
    """Against the same trials, each alone in its array, and against plain loops that draw them by public names."""
    arguments: dict[str, Any] = {"metric": "valid_loss", "mode": "min"}
    together = tune(task, space, tmp_path / "together", **arguments)
    alone = tune(task, space, tmp_path / "alone", fuse=False, **arguments)
    assert array_sizes(together.directory) == [len(together.trials)]
    assert array_sizes(alone.directory) == [1] * len(together.trials)
    check_equal(curves(together.directory), curves(alone.directory))
    check_plain(together, task)


def test_a_random_split_is_the_same_one_in_every_process(tmp_path: Path) -> None:
    space = {"lr": FEW_RATES, "width": shoal.grid([8, 9])}
    algorithm = shoal.Grid(epochs=2)
    one = tune(tasks.RandomSplit(), space, tmp_path / "one", algorithm=algorithm, backend="local", devices="cpu:2")
    other = tune(tasks.RandomSplit(), space, tmp_path / "other", algorithm=algorithm)
    check_equal(curves(one.directory), curves(other.directory))
