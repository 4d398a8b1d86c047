import errno
import io
import math
import os
import platform
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from contract_samples import write_checkpoint
from torch import nn

from shoal.core.trial import Report
from shoal.train.checkpoint import Checkpoint, Weights, load_newest
from shoal.train.checkpoint_paths import state_files


def checkpoint(epoch: int, step: int = 0, value: float = 0.0) -> Checkpoint:
    reports = tuple(Report(3, e, {"loss": math.nan if e == 1 else 1 / e}, 0.5) for e in range(1, epoch + 1))
    state = {"weight": torch.full((2, 2), value)}
    return Checkpoint(
        3, epoch, step, state, {"state": {}, "param_groups": [{"lr": 0.1}]}, {"last_epoch": epoch}, reports
    )


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, checkpoint(2, 5, 1.5))
    found = load_newest(tmp_path, 3)
    assert found is not None
    assert (found.epoch, found.step, found.scheduler) == (2, 5, {"last_epoch": 2})
    assert torch.equal(found.model["weight"], torch.full((2, 2), 1.5))
    assert [report.epoch for report in found.reports] == [1, 2]
    assert math.isnan(found.reports[0].metrics["loss"])
    assert found.reports[1] == Report(3, 2, {"loss": 0.5}, 0.5)


def test_the_two_newest_are_kept(tmp_path: Path) -> None:
    paths = [
        write_checkpoint(tmp_path, checkpoint(epoch, step))
        for epoch, step in [(0, 7), (0, 20), (1, 0), (1, 9), (10, 0)]
    ]
    assert sorted(paths[0].parent.glob("*.pt")) == sorted(paths[-2:])
    assert [path.name[:13] for path in state_files(tmp_path, 3)] == [path.name[:13] for path in paths[:-3:-1]]


def test_the_newest_is_the_furthest_one(tmp_path: Path) -> None:
    for epoch, step in [(9, 0), (9, 100000), (10, 0)]:
        write_checkpoint(tmp_path, checkpoint(epoch, step))
        found = load_newest(tmp_path, 3)
        assert found is not None
        assert (found.epoch, found.step) == (epoch, step)


def test_one_from_before_takes_the_place_of_damaged_ones_beyond_it(tmp_path: Path) -> None:
    """Training continued from an old checkpoint, so later checkpoints must be damaged."""
    write_checkpoint(tmp_path, checkpoint(1))
    newest = write_checkpoint(tmp_path, checkpoint(2))
    newest.write_bytes(b"")
    middle = write_checkpoint(tmp_path, checkpoint(1, 4))
    assert not newest.exists()
    assert [len(list(middle.parent.glob(kind))) for kind in ("*.pt", "*.state")] == [2, 2]
    found = load_newest(tmp_path, 3)
    assert found is not None
    assert (found.epoch, found.step) == (1, 4)


class FullDisk(io.BytesIO):
    def write(self, data: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_is_told_as_such_and_leaves_the_one_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = write_checkpoint(tmp_path, checkpoint(1))
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode: FullDisk())
        with pytest.raises(OSError, match="No space left on device") as found:
            write_checkpoint(tmp_path, checkpoint(2))
    assert found.value.errno == errno.ENOSPC
    assert list(before.parent.glob("*.pt")) == [before]


def test_of_a_view_only_its_own_elements_are_stored(tmp_path: Path) -> None:
    stacked = torch.arange(200_000.0).view(2, -1)
    state = Checkpoint(3, 1, 0, {"weight": stacked[1]}, {"state": {}, "param_groups": []}, None, ())
    path = write_checkpoint(tmp_path, state)
    assert path.stat().st_size < 1.1 * stacked[1].nbytes
    found = load_newest(tmp_path, 3)
    assert found is not None
    assert torch.equal(found.model["weight"], stacked[1])


def test_the_file_alone_tells_which_model_to_build(tmp_path: Path) -> None:
    config = {"model": {"kind": "mlp", "width": 8}, "lr": 0.1, "tied": True, "sizes": [1, 2], "none": None}
    path = write_checkpoint(tmp_path, replace(checkpoint(1), config=config))
    assert torch.load(path, weights_only=True)["config"] == config
    found = load_newest(tmp_path, 3)
    assert found is not None
    assert found.config == config
    equal = {"none": None, "sizes": [1, 2], "tied": True, "lr": 0.1, "model": {"width": 8, "kind": "".join("mlp")}}
    (tmp_path / "again").mkdir()
    again = write_checkpoint(tmp_path / "again", replace(checkpoint(1), config=equal))
    assert again.read_bytes() == path.read_bytes()


def test_trials_do_not_see_each_others(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, checkpoint(1))
    assert load_newest(tmp_path, 4) is None


def test_what_a_killed_writer_left_is_not_a_checkpoint(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, checkpoint(1))
    (path.parent / "123.partial").write_bytes(path.read_bytes()[:50])
    (path.parent / "notes.pt").write_bytes(b"mine")
    found = load_newest(tmp_path, 3)
    assert found is not None
    assert found.epoch == 1


def test_a_view_is_stored_without_the_rest_of_its_tensor(tmp_path: Path) -> None:
    whole = torch.zeros(1000, 1000)
    state = Checkpoint(3, 1, 0, {"weight": whole[3]}, {}, None, ())
    assert write_checkpoint(tmp_path, state).stat().st_size < 20_000


def test_weights_of_which_none_is_real_are_copied() -> None:
    weight = torch.randn(2, dtype=torch.complex64)
    copy = Weights(3, 1, 0, {"weight": weight}).copied(frozenset(), frozenset())
    assert torch.equal(copy.model["weight"], weight)
    assert copy.model["weight"] is not weight


def test_what_was_frozen_or_shared_comes_back_in_the_models_own_classes(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    model[0].weight.requires_grad_(False)
    model(torch.randn(5, 3))
    write_checkpoint(tmp_path, Checkpoint(3, 1, 0, model.state_dict(), {}, None, ()))
    other = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
    found = load_newest(tmp_path, 3)
    assert found is not None
    other.load_state_dict(found.model)
    for name, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


@pytest.mark.skipif(not os.access("/dev/full", os.W_OK), reason="needs /dev/full")
def test_a_disk_without_room_leaves_the_earlier_ones(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, checkpoint(1))
    (path.parent / f"{platform.node()}-{os.getpid()}.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        write_checkpoint(tmp_path, checkpoint(2))
    assert list(path.parent.glob("*.pt")) == [path]
