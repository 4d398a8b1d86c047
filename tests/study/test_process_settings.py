"""Settings of torch in the process that calls `tune` hold in its workers, after a resume elsewhere, and in a rerun."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from shoal.algorithms.random import Random
from shoal.api import resume, tune
from shoal.host import process_settings
from shoal.host.process_settings import applied, apply, current
from shoal.results import Study

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
sys.path[:] = {path!r}
import torch, shoal
from torch.utils.data import TensorDataset

torch.set_default_dtype(torch.float64)
torch.use_deterministic_algorithms(True)
torch.set_float32_matmul_precision("high")
torch.autograd.set_detect_anomaly(True)
torch.backends.cudnn.deterministic = True

class Fit(shoal.Task):
    def __init__(self, folder):
        self.folder, self.engine = folder, os.getpid()

    def data(self, config):
        x = torch.randn(64, 4)
        return (both := TensorDataset(x, x.sum(1, keepdim=True))), both

    def model(self, config): return torch.nn.Linear(4, 1)
    def optimizer(self, model, config): return torch.optim.SGD(model.parameters(), lr=config["lr"])
    def loss(self, model, batch): return (model(batch[0]) - batch[1]).square().mean()

    def end_epoch(self, model, config):
        from shoal.host.process_settings import current
        with (self.folder / "seen").open("a") as file:
            file.write(json.dumps(current()) + "\\n")
        if not (self.folder / "killed").exists():
            (self.folder / "killed").touch()
            os.kill(self.engine, signal.SIGKILL)
            time.sleep(60)

shoal.tune(Fit(Path({folder!r})), {{"lr": shoal.grid([0.01, 0.03])}}, metric="valid_loss", mode="min",
           algorithm=shoal.Grid(2), fuse=False, devices="cpu:1", checkpoint_seconds=0.0,
           directory={folder!r} + "/study", show_progress=False)
"""

WANTED = {
    "default_dtype": "float64",
    "deterministic_debug_mode": 2,
    "detect_anomaly": True,
    "float32_matmul_precision": "high",
    "backends.cudnn.deterministic": True,
    "backends.cuda.matmul.allow_tf32": True,
}


@pytest.mark.parametrize("backend", ["local", "inline"])
def test_they_outlive_the_process_that_has_set_them(
    backend: str, shoal: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(SCRIPT.format(path=sys.path, folder=str(tmp_path)))
    done = shoal("run", program, cwd=tmp_path)
    assert done.returncode == -signal.SIGKILL, done.stderr
    study = resume(tmp_path / "study", backend=backend, show_progress=False)
    again = study.rerun(0)
    assert again.found[2] == pytest.approx(again.recorded[2], rel=1e-12)
    assert next(study.model(0).parameters()).dtype == torch.float64
    seen = [json.loads(line) for line in (tmp_path / "seen").read_text().splitlines()]
    assert len(seen) >= 1 + 4 + 2
    for settings in seen:
        assert {name: value for name, value in settings.items() if name != "num_threads"} == WANTED
    assert not current().keys() & WANTED.keys()


@pytest.fixture
def own_settings() -> Iterator[None]:
    with applied(current()):
        yield


def test_defaults_are_not_recorded() -> None:
    assert current().keys() <= {"num_threads"}


def test_within_a_context_they_hold_and_afterwards_no_longer(own_settings: None) -> None:
    apply({"backends.cudnn.benchmark": True, "default_dtype": "float64"})
    before, threads = current(), torch.get_num_threads()
    with applied({"default_dtype": "float16", "deterministic_debug_mode": 1}):
        assert torch.get_default_dtype() == torch.float16
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert not torch.backends.cudnn.benchmark
        torch.set_num_threads(threads + 1)
    assert current() == before
    assert torch.get_num_threads() == threads


def test_a_lower_number_of_threads_is_the_most_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_settings.ThisMachine, "cores", lambda self: 8)
    monkeypatch.setattr(process_settings, "threads", lambda cores: cores)
    monkeypatch.setattr(process_settings.psutil, "cpu_count", lambda logical: 4)
    for number, limit in ((3, 3), (4, sys.maxsize), (8, sys.maxsize)):
        monkeypatch.setattr(torch, "get_num_threads", lambda number=number: number)
        assert process_settings.thread_limit(current()) == limit


NEWER = """
import torch
from shoal.host.process_settings import applied, apply, current
torch.backends.cuda.matmul.fp32_precision = "tf32"
found = {name: value for name, value in current().items() if name != "num_threads"}
assert found == {"backends.cuda.matmul.fp32_precision": "tf32"}, found
with applied({}):
    assert torch.backends.cuda.matmul.fp32_precision == "none"
assert torch.backends.cuda.matmul.fp32_precision == "tf32"
"""


def test_the_newer_names_of_precisions_are_known() -> None:
    done = subprocess.run([sys.executable, "-c", NEWER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def trained(config: Any) -> None:
    import shoal

    shoal.report({"loss": 1.0})


def test_a_function_that_sets_none_of_its_own_is_warned_about(
    own_settings: None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    torch.set_default_dtype(torch.float64)
    search = {"metric": "loss", "mode": "min", "algorithm": Random(1, epochs=1), "devices": "cpu:1"}
    tune(trained, {"lr": [0.1]}, directory=tmp_path / "study", show_progress=False, **search)
    (warning,) = [text for text in caplog.messages if "settings" in text]
    assert "torch's settings default_dtype" in warning
    assert warning.endswith("of this process do not hold in workers; set them in the function")
    assert Study(tmp_path / "study").trials[0].metrics["loss"] == 1.0
