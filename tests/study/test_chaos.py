"""Kills at random moments; the whole of it is `benchmarks/chaos.py`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "benchmarks" / "chaos.py"


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["task", "function", "command"])
def test_a_study_that_is_killed_again_and_again_ends_as_if_it_had_not_been(kind: str) -> None:
    command = [sys.executable, CHAOS, "--kinds", kind, "--rounds", "2"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    figures = json.loads(run.stdout.splitlines()[-1])
    assert figures["differences"] == []
    kills = {kind: sum(found.values()) for kind, found in figures["kills"].items()}
    assert kills == {kind: 2}
