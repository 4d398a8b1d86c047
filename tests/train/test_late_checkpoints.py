"""A checkpoint that another machine has written, and that a network file system shows late, is waited for."""

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from contract_samples import write_checkpoint
from torch import nn

from shoal.core.trial import Report, Trial, TrialState
from shoal.study.trials import TrialRecord, TrialTable
from shoal.train import checkpoint_paths
from shoal.train.checkpoint import Checkpoint, load_newest
from shoal.train.checkpoint_paths import checkpoint_directory, checkpoint_stem, wait_for_checkpoint

TRIAL = 3


def saved(directory: Path, epoch: int, step: int = 0) -> Path:
    return write_checkpoint(directory, Checkpoint(TRIAL, epoch, step, nn.Linear(2, 1).state_dict(), {}, None, ()))


@dataclass
class Network:
    """A file system that shows a file after some looks."""

    file: Path
    hidden: Path
    looks: int
    waited: list[float] = field(default_factory=list)

    def sleep(self, seconds: float) -> None:
        self.waited.append(seconds)
        if len(self.waited) == self.looks:
            self.hidden.rename(self.file)


def hide(file: Path, looks: int) -> Network:
    hidden = file.with_suffix(".hidden")
    file.rename(hidden)
    return Network(file, hidden, looks)


@pytest.fixture
def on_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_paths, "network_file_system", lambda path: "nfs4")


@pytest.mark.usefixtures("on_a_network")
def test_a_checkpoint_that_is_shown_late_is_waited_for(tmp_path: Path) -> None:
    saved(tmp_path, 2)
    network = hide(saved(tmp_path, 3), looks=4)
    assert wait_for_checkpoint(tmp_path, TRIAL, checkpoint_stem(3, 0), sleep=network.sleep)
    assert len(network.waited) == 4
    newest = load_newest(tmp_path, TRIAL, checkpoint_stem(3, 0))
    assert newest is not None
    assert newest.epoch == 3


@pytest.mark.usefixtures("on_a_network")
def test_one_that_is_not_shown_in_time_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 2)
    hide(saved(tmp_path, 3), looks=0)
    assert not wait_for_checkpoint(tmp_path, TRIAL, checkpoint_stem(3, 0), seconds=0.0)
    monkeypatch.setattr("shoal.train.checkpoint.wait_for_checkpoint", lambda *arguments: False)
    with caplog.at_level(logging.WARNING, "shoal.train"):
        newest = load_newest(tmp_path, TRIAL, checkpoint_stem(3, 0))
    assert newest is not None
    assert newest.epoch == 2
    assert "checkpoint 000003-000000 of trial 3 is not visible here" in caplog.text


def test_on_a_local_file_system_nothing_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_paths, "network_file_system", lambda path: "")
    saved(tmp_path, 2)
    network = Network(tmp_path, tmp_path, looks=0)
    assert not wait_for_checkpoint(tmp_path, TRIAL, checkpoint_stem(3, 0), sleep=network.sleep)
    assert wait_for_checkpoint(tmp_path, TRIAL, checkpoint_stem(1, 500), sleep=network.sleep), "a newer one will do"
    assert network.waited == []


def test_a_trial_goes_on_from_the_newest_checkpoint_that_was_reported() -> None:
    table = TrialTable()
    record = TrialRecord(Trial(TRIAL, {}, 0, 0), target=9)
    table.move(record, TrialState.RUNNING)
    assert record.member.checkpoint == ""
    for epoch, checkpoint in ((1, ""), (2, "000001-000040"), (3, "000001-000040"), (4, "")):
        table.reported(Report(TRIAL, epoch, checkpoint=checkpoint))
    assert record.member.checkpoint == "000001-000040"
    assert (record.member.start, record.member.target) == (4, 9)


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[list[str]] = []
    sync = os.fsync

    def fsync(descriptor: int) -> None:
        sync(descriptor)
        synced.append(sorted(path.suffix for path in checkpoint_directory(tmp_path, TRIAL).iterdir()))

    monkeypatch.setattr(os, "fsync", fsync)
    saved(tmp_path, 1)
    assert synced == [[".partial"], [".partial", ".state"]]
