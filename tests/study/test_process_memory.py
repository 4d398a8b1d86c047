"""Limits of the main memory of functions and commands, and what the kernel kills first, in real processes."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from finished import Noisy
from programs import search

import shoal
from shoal.core.device import Device
from shoal.core.errors import ShoalError
from shoal.core.event import Outcome
from shoal.core.resources import parse_bytes
from shoal.core.trial import TrialState
from shoal.journal.view import JournalView
from shoal.programs.memory_limits import MemoryLimits, limit_gpu_memory
from shoal.programs.opaque import Command
from shoal.spec import StudySpec
from shoal.testing.backends import scripted_job

GIB = 1 << 30


def allocates(config: Any) -> None:
    """Writes no page of what it allocates, which would take the test's memory."""
    score = int(Path("/proc/self/oom_score_adj").read_text())
    data = bytearray(config["bytes"])
    shoal.report({"loss": float(len(data)), "score": score})


COMMAND = 'import json, sys; data = bytearray(int(sys.argv[1])); print(json.dumps({"loss": float(len(data))}))'


@pytest.mark.parametrize("kind", ["function", "command"])
def test_what_exceeds_its_limit_fails_with_the_figure_and_its_neighbour_completes(tmp_path: Path, kind: str) -> None:
    command = Command(
        (sys.executable, "-c", COMMAND.replace("{", "{{").replace("}", "}}"), "{bytes}"), ("loss",), tmp_path
    )
    task = allocates if kind == "function" else command
    space = {"bytes": shoal.grid([1024, 2 * GIB])}
    study = search(task, tmp_path, space, memory_limit="512MiB", algorithm=shoal.Grid(1))
    fine, large = study.trials
    assert (fine.state, fine.metrics["loss"]) == (TrialState.COMPLETE, 1024.0)
    assert (large.state, large.failures) == (TrialState.FAILED, 0), "it is not retried: it would exceed its limit again"
    name = "allocates" if kind == "function" else Path(sys.executable).name
    assert large.reason.startswith(
        f"{name} exceeded its own limit of 512 MiB in a process; if it needs more, raise that"
    )
    assert "MemoryError" in large.reason
    if kind == "function":
        own = int(Path("/proc/self/oom_score_adj").read_text())
        assert fine.metrics["score"] == min(1000, own + 500)
        with JournalView.read(study.directory) as journal:
            assert journal.spec.memory_limit == "512MiB"


def test_a_limit_holds_for_each_process_and_leaves_what_was_inherited(tmp_path: Path) -> None:
    lines = (
        "import os, subprocess, sys; from shoal.programs.memory_limits import limit_main_memory; "
        "kept = bytearray(300 << 20); os.environ['SHOAL_PROCESS_MEMORY'] = str(256 << 20); limit_main_memory(); "
        "assert 'SHOAL_PROCESS_MEMORY' not in os.environ; more = bytearray(128 << 20); "
        "pid = os.fork() or bytearray(64 << 20) and os._exit(7); _, status = os.waitpid(pid, 0); "
        "print(os.waitstatus_to_exitcode(status))\n"
        "try: bytearray(512 << 20)\n"
        "except MemoryError: print('refused')"
    )
    done = subprocess.run([sys.executable, "-c", lines], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["7", "refused"]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        pytest.param(
            "lots", '`memory_limit` must be "auto", None, or the bytes .* such as "8GiB", got \'lots\'', id="words"
        ),
        pytest.param("8 gb", "got '8 gb'", id="unit"),
        pytest.param("-1GiB", "got '-1GiB'", id="negative"),
        pytest.param(0, "got 0", id="zero"),
        pytest.param(True, "got True", id="a truth value"),
        pytest.param(2.5e9, "got 2500000000.0", id="a float"),
        pytest.param("1MiB", "at least 32 MiB, .* got '1MiB'", id="too few for Python"),
        pytest.param(2**63, "got 9223372036854775808", id="more than the kernel counts"),
    ],
)
def test_refused_before_there_is_a_directory(tmp_path: Path, value: object, message: str) -> None:
    with pytest.raises(ShoalError, match=message):
        search(allocates, tmp_path, memory_limit=value)
    assert not (tmp_path / "study").exists()


def test_bytes_are_refused_for_a_task(tmp_path: Path) -> None:
    with pytest.raises(ShoalError, match="`memory_limit` '8GiB' is for a process of its own, of a function or command"):
        search(Noisy(), tmp_path, memory_limit="8GiB")


def test_bytes_are_refused_where_nothing_enforces_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ShoalError, match="`memory_limit` '8GiB' needs Linux"):
        search(allocates, tmp_path, memory_limit="8GiB")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("8GiB", 8 * GIB),
        ("1.5 GB", 1_500_000_000),
        ("4096", 4096),
        ("512 MiB", GIB // 2),
        ("8", 8),
        ("8Gi", None),
        ("", None),
    ],
)
def test_bytes_of_a_text(text: str, found: int | None) -> None:
    assert parse_bytes(text) == found


@pytest.mark.parametrize(("limit", "found"), [("auto", 0), (None, 0), ("8GiB", 8 * GIB), (GIB, GIB)])
def test_bytes_of_a_process(limit: Any, found: int) -> None:
    assert StudySpec(metric="loss", mode="min", memory_limit=limit).process_memory == found


@pytest.mark.parametrize(
    ("outcome", "message", "own"),
    [
        pytest.param(Outcome.OUT_OF_MEMORY, "MemoryError", True, id="main memory"),
        pytest.param(Outcome.OUT_OF_MEMORY, "torch.OutOfMemoryError: CUDA out of memory", False, id="the GPU's"),
        pytest.param(Outcome.RAISED, "ValueError", False, id="another error"),
    ],
)
def test_which_failures_are_of_the_limit(outcome: Outcome, message: str, own: bool) -> None:
    assert (MemoryLimits(3 << 20).reason("net", outcome, message) is not None) is own
    assert MemoryLimits().reason("net", outcome, message) is None


def test_a_function_beside_others_on_a_gpu_has_a_part_of_it_unless_mps_limits_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Awaits a GPU: that torch calls it before the first tensor is as of `torch.cuda.manual_seed`."""
    gpu, job = Device("cuda:0", "H200", 100), replace(scripted_job("one"), memory_limit=25)
    assert MemoryLimits.of(job, gpu, 0).variables() == {"SHOAL_GPU_FRACTION": "0.25"}
    assert MemoryLimits.of(replace(job, memory_limit=0), gpu, 0).variables() == {}
    assert MemoryLimits.of(job, Device("cpu:0", "cpu", 100), 7).variables() == {"SHOAL_PROCESS_MEMORY": "7"}
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda, "_lazy_call", lambda call: calls.append(call))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part: calls.append(part))
    monkeypatch.setenv("SHOAL_GPU_FRACTION", "0.25")
    limit_gpu_memory()
    calls[0]()
    assert calls[1:] == [0.25]
    assert "SHOAL_GPU_FRACTION" not in os.environ
    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", "/tmp/mps")
    assert MemoryLimits.of(job, gpu, 0).variables() == {}
