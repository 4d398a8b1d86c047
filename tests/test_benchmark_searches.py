"""The benchmark of whole searches: its judgement names what is missed."""

import sys
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sklearn")
sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import searches
from search_tasks.registry import OTHERS, SEARCHES
from search_tasks.search import Search
from searches import Measured, Run, run

from shoal.core.errors import MpsError

LINEAR = SEARCHES["200 linear"]


def runs(seconds: Mapping[str, float], search: Search = LINEAR, best: float = 0.9, spent: float = 1.0) -> Measured:
    """One run of each way; Shoal's activities sum to `spent` times its seconds, of which one is for training steps."""
    made = {}
    for way, took in seconds.items():
        activities = {"steps": 1.0, "start": took * spent - 1.0} if way in ("empty", "full") else {}
        made[way] = [Run(took, best if way == "full" else 0.9, activities)]
    return Measured(search, made)


@pytest.mark.parametrize(
    ("found", "missed"),
    [
        pytest.param(runs({"plain": 40, "pool": 20, "empty": 30, "full": 25}), [], id="speed is judged by the index"),
        pytest.param(runs({"plain": 40, "empty": 50}), [], id="nothing to compare with"),
        pytest.param(
            runs({"plain": 40, "pool": 20, "empty": 15, "full": 10}, best=0.8, spent=1.05),
            ["best apart 0.1, asked 0.02", "activities apart 0.05, asked 0.02"],
            id="other results, and time of which nothing is known",
        ),
    ],
)
def test_what_is_missed_is_named(found: Measured, missed: list[str]) -> None:
    assert found.missed() == missed


@pytest.mark.parametrize(
    ("name", "seconds", "missed"),
    [
        pytest.param("8 ResNet-18", {"plain": 10, "pool": 1, "empty": 6, "full": 3}, [], id="all reached"),
        pytest.param(
            "8 ResNet-18", {"plain": 10, "empty": 7}, ["empty of plain 0.7, asked 0.6"], id="of the plain loop"
        ),
        pytest.param(
            "32 ResNet-18",
            {"plain": 20, "pool": 8, "empty": 6, "full": 5},
            ["empty of pool 0.75, asked 0.7", "overhead of full of empty 0.8, asked 0.5"],
            id="of the pool and of the first",
        ),
        pytest.param("8 ResNet-18, halving", {"plain": 1, "empty": 2}, [], id="nothing is asked"),
        pytest.param("8 ResNet-18", {"empty": 9}, [], id="nothing to compare with"),
    ],
)
def test_what_a_search_on_a_gpu_misses_is_named(name: str, seconds: dict[str, float], missed: list[str]) -> None:
    assert runs(seconds, OTHERS[name]).missed(on_gpu=True) == missed


def test_the_values_of_several_seeds_are_those_of_single_trials(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    search = OTHERS["32 perceptrons, five seeds"]
    found = {way: run(search, search.task(tmp_path, True), True, way) for way in ("plain", "empty")}
    assert Measured(search, {way: [each] for way, each in found.items()}).compared()["best apart"] < 0.02
    assert found["empty"].spent
    assert not found["plain"].spent


@pytest.mark.parametrize(("fault", "note"), [("", "MPS"), ("it is off", "time slices: it is off")])
def test_the_processes_of_the_pool_share_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, note: str
) -> None:
    asked = []

    class Daemon:
        def __init__(self, uuid: str) -> None:
            self.uuid = uuid

        def start(self) -> None:
            if fault:
                raise MpsError(fault)

        def environment(self) -> dict[str, str]:
            return {"daemon": self.uuid}

        def stop(self) -> None:
            asked.append("stopped")

    def pool(search: Any, folder: Path, slots: int, environment: Any) -> Any:
        asked.append((search.device.type, slots, environment))
        return SimpleNamespace(best=2.3)

    gpu = SimpleNamespace(torch_name="cuda:0", is_cuda=True, uuid="GPU-1")
    monkeypatch.setattr(searches, "discover", lambda device: [("node", gpu)])
    monkeypatch.setattr(searches, "MpsDaemon", Daemon)
    monkeypatch.setattr(searches, "in_processes", pool)
    monkeypatch.setattr(searches.torch, "set_num_threads", lambda count: None)
    search = OTHERS["64 perceptrons"]
    found = run(search, search.task(tmp_path, True), True, "pool", "cuda:0")
    assert (found.best, found.note) == (2.3, note)
    assert asked == ([("cuda", 8, None)] if fault else [("cuda", 8, {"daemon": "GPU-1"}), "stopped"])
