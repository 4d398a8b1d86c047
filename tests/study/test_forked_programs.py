"""Functions that run in forks of a worker: they need no imports, and have what a new process would have."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

IMPORTED_ONCE = """
import os
with open("imports", "a") as file:
    file.write(f"{os.getpid()} ")
"""

STUDY = """
import atexit, json, multiprocessing, os, random, sys, tempfile, threading, time
import numpy, torch
import shoal, imported_once

random.seed(0), numpy.random.seed(0), torch.manual_seed(0)
torch.set_num_threads(2)
folder = tempfile.TemporaryDirectory(dir=".")
shoal.report({"loss": 0.0})  # of no trial
atexit.register(print, "the exit of the caller", flush=True)


def train(config):
    shoal.report({"loss": config["slope"]})
    facts = {
        "drawn": [random.random(), numpy.random.rand(), torch.initial_seed()],
        "main": hasattr(sys.modules["__main__"], "train"),
        "process": multiprocessing.current_process().name,
        "threads": torch.get_num_threads(),
        "compiler": "torch._dynamo" in sys.modules,
        "visible": os.environ["CUDA_VISIBLE_DEVICES"],
        "imported": imported_once.__name__,
    }
    atexit.register(print, "the exit of the function", json.dumps(facts), flush=True)
    kept.append(tempfile.TemporaryDirectory(dir="kept"))
    parameter = torch.ones(1, requires_grad=True)
    torch.optim.Adam([parameter]).zero_grad()
    print("standard output")
    sys.exit(config["status"])


kept = []
{before}
study = shoal.tune(
    train, {"slope": shoal.grid([1.0, 2.0, 3.0]), "status": shoal.choice([0])}, metric="loss", mode="min",
    algorithm=shoal.Grid(2), devices="cpu:2", directory="study", show_progress=False,
)
assert os.path.isdir(folder.name)
print([(trial.epoch, trial.metrics["loss"]) for trial in study.trials])
"""

A_THREAD = "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
"""Forbids a fork of the caller, so that the server is a new process."""


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("", id="server is a fork"),
        pytest.param(A_THREAD, id="server is new", marks=pytest.mark.thorough),
    ],
)
def test_a_function_in_a_fork_has_what_a_new_process_has(before: str, tmp_path: Path) -> None:
    module = tmp_path / "imported_once.py"
    module.write_text(IMPORTED_ONCE)
    os.utime(module, (0, 0))  # else the caller is not forked: it might have imported what was there before
    (tmp_path / "study.py").write_text(STUDY.replace("{before}", before))
    (tmp_path / "kept").mkdir()
    environment = {**os.environ, "SHOAL_CACHE": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "study.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "[(2, 1.0), (2, 2.0), (2, 3.0)]" in done.stdout, "each counts its reports from 1"
    assert done.stdout.count("the exit of the caller") == 1
    logs = "".join(path.read_text() for path in sorted((tmp_path / "study" / "logs").glob("job-*.log")))
    assert "the exit of the caller" not in logs
    assert logs.count("standard output\n") == 3
    facts: list[dict[str, Any]] = [
        json.loads(line.removeprefix("the exit of the function "))
        for line in logs.splitlines()
        if line.startswith("the exit of the function ")
    ]
    assert len(facts) == 3
    for each in (0, 1, 2):
        assert len({fact["drawn"][each] for fact in facts}) == 3, "the generators of the caller are seeded"
    for fact in facts:
        assert (fact["main"], fact["process"], fact["threads"]) == (False, "MainProcess", 1)
        assert (fact["compiler"], fact["visible"]) == (False, "")
    assert not list((tmp_path / "kept").iterdir()), "finalizers of the function have run"
    imports = (tmp_path / "imports").read_text().split()
    assert len(imports) == (4 if before else 1), "by the caller, and by each process that is no fork of it"
