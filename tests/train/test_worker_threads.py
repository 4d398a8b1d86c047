"""The number of threads of a worker."""

from pathlib import Path

import cloudpickle
import pytest
import torch
from contract_samples import Small

from shoal.core.device import Device
from shoal.core.job import WorkerContext
from shoal.core.trial import Trial
from shoal.programs.process import program_environment
from shoal.train.run import prepare


@pytest.mark.parametrize(
    ("allowed", "threads"),
    [
        pytest.param(None, 4, id="as many as the device has cores"),
        pytest.param("1", 1, id="no more than its user allows"),
        pytest.param("8", 4, id="no more than there are cores"),
        pytest.param("2,1", 2, id="the outermost level counts"),
        pytest.param("0", 1, id="at least one"),
        pytest.param("many", 4, id="no number"),
    ],
)
def test_a_worker_has_threads_for_its_cores(
    allowed: str | None, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    monkeypatch.delenv("OMP_NUM_THREADS")
    if allowed is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", allowed)
    device = Device("cpu:0", "cpu/4", memory=2**30, cores=4)
    prepare(device, WorkerContext(tmp_path, cloudpickle.dumps(Small())))
    assert asked == [threads]
    assert program_environment(Trial(0, {}, 0, 0), device, "", tmp_path, 0)["OMP_NUM_THREADS"] == str(threads), (
        "programs, too"
    )
