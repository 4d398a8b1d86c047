"""Ray Tune's function trainables and searchers in studies of Shoal."""

import os
import random
import signal
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.core.distributions import Normal, QLogUniform
from shoal.core.domain import LogRandInt, RandInt
from shoal.core.errors import AlgorithmError, SpaceError, TaskError
from shoal.core.space import Space, choice, loguniform, normal, qloguniform, quniform, randint, uniform
from shoal.core.trial import Report, Trial, TrialState
from shoal.integrations.ray_tune import RaySearch, ray_trainable
from shoal.journal.view import JournalView
from shoal.testing import check_algorithm

pytest.importorskip("ray.tune")

from ray.tune.search import Searcher

SPACE = Space(
    {
        "lr": loguniform(1e-4, 1),
        "rate": quniform(0.1, 0.9, 0.1),
        "width": randint(16, 64),
        "optimizer": choice([{"name": "sgd", "momentum": uniform(0, 1)}, {"name": "adam"}]),
    }
)


class Best(Searcher):
    """Proposes values near those of the best trial so far."""

    def __init__(self, seed: int, most: int = 10**6) -> None:
        super().__init__()
        self.random = random.Random(seed)
        self.most = most
        self.made: dict[str, Any] = {}
        self.results: list[tuple[str, int]] = []
        self.best: tuple[float, str] | None = None

    def set_search_properties(self, metric: str | None, mode: str | None, config: Any, **spec: Any) -> bool:
        self._metric, self._mode, self.space = metric, mode, config
        return True

    def suggest(self, trial_id: str) -> Any:
        if len(self.made) == self.most:
            return Searcher.FINISHED
        drawn = {name: domain.sample(random_state=self.random.getrandbits(31)) for name, domain in self.space.items()}
        self.made[trial_id] = drawn
        if self.best is not None and self.random.random() < 0.5:
            self.made[trial_id] = self.made[self.best[1]]
        return self.made[trial_id]

    def on_trial_result(self, trial_id: str, result: Any) -> None:
        self.results.append((trial_id, result["training_iteration"]))

    def on_trial_complete(self, trial_id: str, result: Any = None, error: bool = False) -> None:
        if not error:
            value = result[self._metric] * (1 if self._mode == "min" else -1)
            self.best = min(self.best or (value, trial_id), (value, trial_id))


class Mute(Best):
    """Proposes nothing."""

    def suggest(self, trial_id: str) -> Any:
        return None


class Own(Best):
    """Has a space of its own."""

    def set_search_properties(self, metric: str | None, mode: str | None, config: Any, **spec: Any) -> bool:
        return False


@pytest.mark.parametrize("most", [10**6, 7], ids=["as many as asked", "ends before"])
def test_a_searcher_keeps_the_contract_of_algorithms(most: int) -> None:
    check_algorithm(lambda: RaySearch(lambda seed: Best(seed, most), 15, 3, concurrency=4), SPACE, synchronous=False)


@pytest.mark.thorough
def test_searchers_of_ray_keep_it_too() -> None:
    hyperopt = pytest.importorskip("ray.tune.search.hyperopt")
    pytest.importorskip("hyperopt")
    check_algorithm(
        lambda: RaySearch(lambda seed: hyperopt.HyperOptSearch(random_state_seed=seed), 15, 2), SPACE, synchronous=False
    )


def proposed(searcher: Any, n: int) -> list[Trial]:
    algorithm = RaySearch(searcher, n, 1, concurrency=n)
    algorithm.bind(SPACE, metric="loss", mode="min", seed=3)
    return [trial for group in algorithm.next_groups(n) for trial in group.trials]


def test_proposals_belong_to_the_space() -> None:
    trials = proposed(Best, 20)
    assert [SPACE.faults(trial.config) for trial in trials] == [()] * 20
    assert {trial.config["optimizer"]["name"] for trial in trials} == {"sgd", "adam"}


@pytest.mark.parametrize(
    ("searcher", "words"),
    [
        (lambda seed: Mute(seed), "proposes nothing although no trial is in training"),
        (lambda seed: Own(seed), "did not take the space"),
        (lambda seed: seed, "must make a ray.tune.search.Searcher"),
        (Best(0), "must be a function that makes one of a seed"),
    ],
    ids=["none proposed", "space of its own", "no searcher", "no function"],
)
def test_searchers_that_cannot_serve_a_study_are_refused(searcher: Any, words: str) -> None:
    with pytest.raises(AlgorithmError, match=words):
        proposed(searcher, 3)


def test_a_searcher_gets_domains_that_ray_has_not_as_quantiles_and_is_asked_again_where_conditions_refuse() -> None:
    space = Space(
        {
            "x": normal(0, 1),
            "n": shoal.logrange(1, 8, 4),
            "o": shoal.ordinal(["a", "b"]),
            "q": qloguniform(1, 9, 1),
            "y": uniform(0, 1 + shoal.ref("n")),
        },
        where=[shoal.ref("n") < 8, shoal.ref("x") > -0.5],
    )
    algorithm = RaySearch(Best, 12, 1, concurrency=2)
    algorithm.bind(space, metric="loss", mode="min", seed=3)
    configs = {}
    while not algorithm.finished:
        for group in algorithm.next_groups(2):
            configs |= {trial.number: trial.config for trial in group.trials}
        algorithm.observe(Report(min(algorithm.training), 1, {"loss": 1.0}, state=TrialState.PAUSED))
    assert [space.faults(config) for config in configs.values()] == [()] * 12


def test_a_searcher_that_proposes_only_what_is_refused_ends_with_an_error() -> None:
    algorithm = RaySearch(Best, 2, 1)
    algorithm.bind(
        Space({"x": uniform(0, 1)}, where=[shoal.ref("x") > 2]), metric="loss", mode="min", seed=0, data_seed=0
    )
    with pytest.raises(AlgorithmError, match="Best made 100 proposals that the conditions of the space refuse"):
        algorithm.next_groups(1)


def test_domains_of_ray_tune_are_those_of_shoal() -> None:
    from ray import tune

    options = [tune.uniform(0, 1), {"width": tune.grid_search([8, 16])}]
    given = Space(
        {
            "uniform": tune.uniform(0.5, 2), "log": tune.loguniform(1e-4, 1), "steps": tune.quniform(0.25, 0.75, 0.25),
            "integer": tune.randint(1, 5), "log_integer": tune.lograndint(1, 100), "even": tune.qrandint(2, 10, 2),
            "grid": tune.grid_search([0.1, 0.2]), "lists": tune.grid_search([[64, 32], [128]]),
            "nested": {"choice": tune.choice(options)}, "constant": 3,
            "normal": tune.randn(1, 2), "normal_steps": tune.qrandn(0, 1, 0.2), "one": tune.qrandint(0, 10, 1),
            "log_steps": tune.qloguniform(0.5, 2, 0.25), "log_even": tune.qlograndint(3, 64, 2),
        }
    )  # fmt: skip
    assert given == Space(
        {
            "uniform": uniform(0.5, 2), "log": loguniform(1e-4, 1), "steps": quniform(0.25, 0.75, 0.25),
            "integer": randint(1, 5), "log_integer": LogRandInt(1, 100), "even": RandInt(2, 11, 2),
            "grid": choice([0.1, 0.2]), "lists": choice([[64, 32], [128]]),
            "nested": {"choice": choice([uniform(0, 1), {"width": choice([8, 16])}])}, "constant": 3,
            "normal": normal(1, 2), "normal_steps": Normal(0, 1, step=0.2), "one": randint(0, 10),
            "log_steps": qloguniform(0.5, 2, 0.25), "log_even": QLogUniform(4, 64, 2, integer=True),
        }
    )  # fmt: skip
    assert {point["grid"] for point in Space({"grid": tune.grid_search([0.1, 0.2])}).grid()} == {0.1, 0.2}


def test_a_function_in_place_of_a_domain_is_refused_by_name() -> None:
    from ray import tune

    with pytest.raises(SpaceError, match=r"`model\.lr`: .* in place of sample_from, .* shoal.ref\('epochs'\)"):
        Space({"model": {"lr": tune.sample_from(lambda spec: 1)}})


def test_a_function_of_ray_tune_without_ray_trainable_is_told_of_it(tmp_path: Path) -> None:
    def function(config: dict[str, Any]) -> None:
        from ray import tune

        warnings.simplefilter("ignore")  # Ray's, that there is no Tuner
        tune.report({"loss": config["x"]})

    with pytest.raises(TaskError, match=r"function ended without a report; .* give to tune as ray_trainable\("):
        shoal.tune(
            function, {"x": 1.0}, metric="loss", mode="min", algorithm=shoal.Random(1, epochs=1), devices="cpu:1",
            directory=tmp_path / "study", show_progress=False,
        )  # fmt: skip


def trainable(config: dict[str, Any]) -> None:
    from ray import tune

    begun = 0
    if checkpoint := tune.get_checkpoint():
        with checkpoint.as_directory() as folder:
            begun = int(Path(folder, "epoch").read_text())
    for epoch in range(begun + 1, 1000):
        if epoch == 3 and not Path(config["marker"]).exists():
            Path(config["marker"]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "epoch").write_text(str(epoch))
            made = tune.Checkpoint.from_directory(folder)
            tune.report({"loss": config["x"] * epoch, "begun": begun, "note": "text"}, checkpoint=made)


def test_a_function_trainable_goes_on_from_its_checkpoint_after_a_kill(tmp_path: Path) -> None:
    study = shoal.tune(
        ray_trainable(trainable),
        {"x": shoal.uniform(1, 2), "marker": str(tmp_path / "killed")},
        metric="loss",
        mode="min",
        algorithm=RaySearch(Best, 1, epochs=4),
        devices="cpu:1",
        directory=tmp_path / "study",
        show_progress=False,
    )
    (row,) = study.trials
    assert (row.state, row.epoch, row.failures) == (TrialState.COMPLETE, 4, 1)
    with JournalView.read(study.directory) as journal:
        reports = journal.curve(0)
    assert [report.metrics["begun"] for report in reports] == [0, 0, 2, 2]
    assert reports[3].metrics["loss"] == 4 * row.config["x"]


def test_a_class_trainable_is_refused() -> None:
    with pytest.raises(TaskError, match=r"takes a function of a config, .*class trainable"):
        ray_trainable(Best)
