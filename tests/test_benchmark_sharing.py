"""The live benchmarks of sharing say how many jobs shared a slot, why none did, and what they lack."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL")
pytest.importorskip("sklearn")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from placed import mixes
from placed.mixes import BY_TRIAL, MIXES, Mixed
from placed.ours import ONE_JOB
from placed.sharing import busy_seconds, demand_text, side_by_side, why_alone

from shoal.core.demand import Profile
from shoal.core.device import Cluster, Device, Node
from shoal.core.job import Purpose
from shoal.core.rows import JobRow
from shoal.core.space import Space

SLOTS = Cluster((Node("node", 2.0, tuple(Device(f"cpu:{index}", "cpu/1", 10**9, cores=1) for index in range(2))),))
WHOLE = Profile({1: 0.01}, 10, 1, 0, 0, compute=1.0, cores=0.98)


def row(device: str, started: float, ended: float | None, purpose: Purpose = Purpose.TRAIN) -> JobRow:
    return JobRow("job", purpose, device, (0,), started, ended, "finished", "")


@pytest.mark.parametrize(
    ("jobs", "most", "busy"),
    [
        pytest.param([], 0, 0, id="none"),
        pytest.param([row("cpu:0", 0, 4), row("cpu:1", 1, 3)], 1, 6, id="a slot each"),
        pytest.param([row("cpu:0", 0, 4), row("cpu:0", 4, 6)], 1, 6, id="one after the other"),
        pytest.param([row("cpu:0", 0, 4), row("cpu:0", 1, 6), row("cpu:0", 2, 3)], 3, 6, id="side by side"),
        pytest.param([row("cpu:0", 0, 4), row("cpu:0", 1, None)], 1, 4, id="one that runs does not count"),
        pytest.param([row("cpu:0", 0, 4), row("cpu:0", 1, 3, Purpose.PROFILE)], 1, 4, id="nor does one that measures"),
    ],
)
def test_jobs_side_by_side_are_counted(jobs: list[JobRow], most: int, busy: float) -> None:
    assert side_by_side(jobs) == most
    assert busy_seconds(jobs) == busy


def test_why_no_job_shares_a_slot() -> None:
    fetched = replace(WHOLE, sample_sharing="batch", fetch_seconds=0.1)
    assert why_alone(fetched, SLOTS).startswith("2 jobs of 0.98 cores each leave no room for another one on 2 cores")
    assert "without the wait for its samples" in why_alone(fetched, SLOTS)
    assert "without the wait" not in why_alone(WHOLE, SLOTS)
    assert why_alone(replace(WHOLE, cores=0.3), SLOTS) == ""


def test_a_demand_in_words() -> None:
    assert demand_text(WHOLE) == "compute 1.00 of a slot, 0.98 cores; epochs on a shared slot: not measured"
    assert "1.05 times as long with 2, 1.40 times as long with 3" in demand_text(
        replace(WHOLE, crowding={3: 1.4, 2: 1.05})
    )


@pytest.mark.parametrize(
    ("mix", "one", "by_trial", "missed"),
    [
        pytest.param("input", 26.0, 20.0, [], id="as asked"),
        pytest.param("input", 20.0, 20.0, ["input: sharing found by trial 1.00x of one job per device, asked 1.3x"]),
        pytest.param("memory + input", 20.0, 20.0, [], id="a part waits"),
        pytest.param("memory", 18.0, 20.0, ["memory: sharing found by trial 0.90x of one job per device, asked 0.97x"]),
    ],
)
def test_what_a_mix_lacks_is_said(mix: str, one: float, by_trial: float, missed: list[str]) -> None:
    assert mixes.judged({mix: {ONE_JOB: one, BY_TRIAL: by_trial}}) == missed


@pytest.mark.parametrize("name", MIXES)
def test_a_mix_has_as_many_jobs_of_each_demand(name: str) -> None:
    bounds = [config["bound"] for config in Space(MIXES[name].space(12)).grid()]
    assert len(bounds) == 12
    assert {bounds.count(bound) for bound in MIXES[name].bounds} == {12 // len(MIXES[name].bounds)}
    assert set(bounds[: len(MIXES[name].bounds)]) == set(MIXES[name].bounds)


@pytest.mark.parametrize("bound", mixes.BATCHES)
def test_a_model_of_a_mix_takes_pictures(bound: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixes, "made", lambda kind, name, rows: pictures(len(rows)))
    monkeypatch.setattr(mixes, "SECONDS", 0.0)
    config = {"bound": bound, "lr": 0.1}
    task = Mixed(0.1)
    train, valid = task.data(config)
    assert len(train) == max(8, mixes.SAMPLES[bound] // 10)
    assert len(valid) == max(8, mixes.VALID[bound] // 10)
    x, y = train[0]
    assert task.model(config).eval()(x[None]).shape == (1, 10)
    assert int(y) == 0


def pictures(count: int) -> Any:
    import torch
    from torch.utils.data import TensorDataset

    return TensorDataset(torch.zeros(count, 3, 32, 32), torch.zeros(count, dtype=torch.long))
