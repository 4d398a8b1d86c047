"""The benchmark of time-sharing has Hermes's bins, and its CNNs train on digits."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from papers.hermes import CURVES, over_rivals, speed_up, speed_up_on
from time_sharing import FOLDER, bin_of
from time_sharing_cnns import CNNS, Digits
from time_sharing_live import GOOD, TRIALS, seconds_to_done, settings_of, speed_ups

from shoal.core.trial import Trial
from shoal.simulate.workload import CURVES_FILE

MEANS = {
    "type 1": {"fifo": (8.0, 8.0), "slaq": (16.0, 16.0), "auto": (2.0, 2.0)},
    "type 2": {"fifo": (6.0, 4.0), "slaq": (3.0, 2.0), "auto": (3.0, 4.0)},
}


@pytest.mark.skipif(not (FOLDER / CURVES_FILE).is_file(), reason="the recorded curves are not there")
@pytest.mark.parametrize("kind", GOOD)
def test_a_bin_has_its_good_trials_on_four_devices(kind: str) -> None:
    drawn = bin_of(3, kind, seed=1)
    assert len({device.name for _, device in drawn.cluster}) == 4
    (source,) = drawn.sources
    least = [min(source.curves.losses(Trial(number, {}, 0, 0), 0, 50)) for number in range(TRIALS)]
    assert sum(loss <= source.curves.target for loss in least) == GOOD[kind]


def test_speed_ups_are_over_fifo_and_the_best_four_are_of_type_2() -> None:
    found = speed_ups("", MEANS)
    assert found == {
        "type 1": {"fifo": 1.0, "slaq": 0.5, "auto": 4.0},
        "type 2": {"fifo": 1.0, "slaq": 2.0, "auto": 2.0},
        "top 4": {"fifo": 1.0, "slaq": 2.0, "auto": 1.0},
    }
    figures = {"speed_up": {"one": found}}
    assert speed_up("type 1")(figures) == 4
    assert speed_up_on("one")(figures) == 3
    assert over_rivals(figures) == pytest.approx(3 / 1.25)
    assert CURVES.quick[:-1] == CURVES.command


@pytest.mark.parametrize("kind", GOOD)
def test_settings_of_a_bin_are_of_the_grid_and_differ(kind: str) -> None:
    settings = settings_of(kind, "VGG16", TRIALS)
    assert len({tuple(each.items()) for each in settings}) == TRIALS
    assert sum(each["optimizer"] in ("rmsprop", "adam") for each in settings) >= GOOD[kind]
    assert settings == settings_of(kind, "VGG16", TRIALS)


def test_a_trial_is_done_at_nine_tenths_of_the_reduction_of_its_loss() -> None:
    assert seconds_to_done([(1.0, 2.0), (2.0, 1.2), (3.0, 1.1), (4.0, 1.0)]) == 3.0
    assert seconds_to_done([(1.0, 2.4), (2.0, 2.5)]) == 1.0
    assert seconds_to_done([(1.0, 2.6), (2.0, 2.5)]) == 2.0


@pytest.mark.parametrize("cnn", CNNS)
def test_a_step_lowers_the_loss_of_a_cnn(cnn: str) -> None:
    torch.manual_seed(0)
    config = {"place": 0}
    task = Digits(Path(), cnn, 16, [{"optimizer": "adam", "batch_size": 16, "lr": 1e-3, "weight_decay": 0.0}])
    model = task.model(config)
    optimizer = task.optimizer(model, config)
    batch = torch.randn(16, 1, 14, 14), torch.arange(16) % 10
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = task.loss(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
