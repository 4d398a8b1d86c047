"""`Study.history`: the reports of trials as a data frame."""

from pathlib import Path
from typing import Any

import pytest

import shoal
from shoal.core.errors import ShoalError
from shoal.core.trial import Report
from shoal.journal import view
from shoal.journal.codec import report_of
from shoal.journal.view import JournalView


def test_a_row_for_each_report(finished: shoal.Study) -> None:
    best = finished.best_trial
    frame = finished.history(best.number)
    with JournalView.read(finished.directory) as journal:
        curve = journal.curve(best.number)
    assert list(frame.columns) == ["epoch", "valid_loss", "seconds", "time"]
    assert list(frame["epoch"]) == [1, 2, 3, 4]
    assert list(frame["valid_loss"]) == [report.metrics["valid_loss"] for report in curve if report.metrics]
    assert frame["seconds"].sum() == pytest.approx(best.seconds)
    assert frame["time"].is_monotonic_increasing
    assert str(frame["time"].dt.tz) == "UTC"


def test_of_all_trials_by_their_numbers(finished: shoal.Study) -> None:
    frame = finished.history()
    assert list(frame.columns) == ["trial", "epoch", "valid_loss", "seconds", "time"]
    assert list(frame["trial"]) == sorted(frame["trial"])
    assert {row.number: row.epoch for row in finished.trials} == dict(frame.groupby("trial")["epoch"].max())
    for number in (0, finished.best_trial.number):
        alone = frame[frame["trial"] == number].drop(columns="trial").reset_index(drop=True)
        assert alone.equals(finished.history(number))


def test_of_one_trial_no_report_of_another_is_decoded(finished: shoal.Study, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []

    def decoded(row: tuple[Any, ...]) -> Report:
        read.append(row[1])
        return report_of(row)

    monkeypatch.setattr(view, "report_of", decoded)
    assert len(finished.history(3)) == read.count(3) > 0
    assert set(read) == {3}


def test_a_metric_may_have_the_name_of_a_column(tmp_path: Path) -> None:
    def train(config: dict[str, float]) -> None:
        shoal.report({"time": 1.0, "loss": config["x"]}, step=1)
        shoal.report({"loss": 2.0, "<b>": 3.0}, step=2)

    study = shoal.tune(
        train, {"x": 4.0}, metric="loss", mode="min", algorithm=shoal.Random(1, epochs=2), backend="inline",
        devices="cpu:1", directory=tmp_path / "study", show_progress=False,
    )  # fmt: skip
    frame = study.history(0)
    assert list(frame.columns) == ["step", "metric.time", "loss", "<b>", "seconds", "time"]
    assert list(frame["step"]) == [1, 2]
    assert list(frame["loss"]) == [4.0, 2.0]
    assert list(frame["metric.time"].isna()) == [False, True]


def test_what_cannot_be_answered(finished: shoal.Study, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ShoalError, match="has no trial 77; its trials are 0-7"):
        finished.history(77)
    monkeypatch.setattr("shoal.look.frame.find_spec", lambda name: None)
    for read in (finished.history, finished.dataframe):
        with pytest.raises(ShoalError, match="a data frame needs pandas"):
            read()
