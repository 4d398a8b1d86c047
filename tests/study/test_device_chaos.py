"""Faults of every kind on invented GPUs; the whole of it is `benchmarks/device_chaos.py`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CHAOS = Path(__file__).parents[2] / "benchmarks" / "device_chaos.py"


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.parametrize("seed", [0])
def test_a_search_to_which_everything_happens_ends_as_if_nothing_had(seed: int) -> None:
    run = subprocess.run(
        [sys.executable, CHAOS, "--quick", "--seed", str(seed)],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    figures = json.loads(run.stdout.splitlines()[-1])
    assert figures["differences"] == []
    assert figures["promised_too_much"] == []
    assert figures["left_behind"] == []
    assert sorted(figures["faults"].values()) == [1] * 6
