"""Pictures of a study by matplotlib: their axes, what they show, and what is refused."""

import matplotlib
import pytest
from halving_samples import halving_study

from shoal.core.errors import ShoalError
from shoal.look.plots import PLOTS
from shoal.results import Study

matplotlib.use("Agg")


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return Study(halving_study(tmp_path_factory.mktemp("plots") / "one"))


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    directory = tmp_path_factory.mktemp("plots") / "two"
    return Study(halving_study(directory, metric=("loss", "seconds"), mode=("min", "max")))


@pytest.mark.parametrize("kind", PLOTS)
def test_every_picture_of_several_metrics_is_drawn_and_leaves_matplotlib_alone(two, kind, tmp_path):
    import matplotlib.pyplot as plt

    before = dict(matplotlib.rcParams)
    figure = two.plot(kind)
    figure.savefig(tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    assert dict(matplotlib.rcParams) == before
    assert plt.get_fignums() == []


def test_slices_are_at_one_budget_with_log_axes_and_short_names(one):
    figure = one.plot("slice")
    drawn = {axes.get_xlabel(): axes for axes in figure.axes if axes.get_xlabel()}
    assert set(drawn) == {"act", "lr", "optimizer", "optimizer[0].momentum"}
    assert drawn["lr"].get_xscale() == "log"
    assert drawn["optimizer[0].momentum"].get_xscale() == "linear"
    assert len(drawn["lr"].collections[0].get_offsets()) == 15
    assert max(len(label.get_text()) for label in drawn["act"].get_xticklabels()) <= 14
    assert figure.get_suptitle().startswith("15 trials after 3 epochs\nbeyond the first rung only survivors remain")
    assert one.plot("slice", budget=1).get_suptitle() == "45 trials after 1 epoch"


def test_curves_of_all_trials_the_best_named(one):
    (axes,) = one.plot("curves").axes
    assert len(axes.lines) == 46  # the one that failed had a report
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert len(names) == 6
    assert names[0] == f"trial {one.best_trial.number}"
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("epoch", "loss")


def test_history_shows_stopped_trials_too(one):
    (axes,) = one.plot("history").axes
    assert len(axes.collections[0].get_offsets()) == 45
    assert axes.lines[0].get_ydata()[-1] == one.best_trial.objective


def test_repeats_are_one_point_with_a_bar(tmp_path):
    study = Study(halving_study(tmp_path / "study", 96, (1, 3), repeats=2))
    for figure, count in ((study.plot("history"), 46), (study.plot("slice", budget=1), 46)):
        points, *_, bars = figure.axes[0].collections
        assert len(points.get_offsets()) == len(bars.get_segments()) == count
    study.plot("curves")
    study.plot("parallel")


def test_the_front_is_that_of_the_study(two):
    (axes,) = two.plot("front").axes
    best = {
        tuple(point)
        for points in axes.collections
        if points.get_label() == "Best Trial"
        for point in points.get_offsets()
    }
    assert best == {(row.metrics["loss"], row.metrics["seconds"]) for row in two.pareto}


def test_importance_has_a_bar_for_each_parameter(one):
    (axes,) = one.plot("importance").axes
    assert [bar.get_width() for bar in axes.patches] == list(one.importance().shares.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        pytest.param(("pie",), "`kind` must be one of history, .* got 'pie'", id="kind"),
        pytest.param(("front",), "plot 'front' needs 2 or 3 metrics; the study compares trials by 1", id="one metric"),
        pytest.param(("curves", 3), "`budget` is for slice, parallel, importance; .* got 3", id="budget"),
        pytest.param(("slice", 99), "no trial has a value of 'loss' after 99 epochs", id="no trial so far"),
    ],
)
def test_refused(one, arguments, message):
    with pytest.raises(ShoalError, match=message):
        one.plot(*arguments)


def test_without_values(tmp_path):
    study = Study(halving_study(tmp_path / "study", 2))
    for kind in PLOTS:
        with pytest.raises(ShoalError, match=r"no trial of the study in .* has a value of 'loss' yet"):
            study.plot(kind)


def test_without_matplotlib(one, monkeypatch):
    monkeypatch.setattr("shoal.look.plots.find_spec", lambda name: None)
    with pytest.raises(ShoalError, match=r"a plot needs matplotlib\. Install it with: pip install matplotlib"):
        one.plot("curves")
