"""A server that is a fork of the calling process: when there is one, and that nothing of the caller disturbs it."""

import multiprocessing
import multiprocessing.forkserver
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
import pytest
import torch
from processes import gone, wait_for
from torch.utils.flop_counter import FlopCounterMode

from shoal.run import Backend, Local
from shoal.run.caller_fork import ForkedProcess, prepare_fork
from shoal.testing.backends import BACKEND_CHECKS

STUDY = """
import os, signal, sys, threading
import torch
import shoal
from torch.utils.data import TensorDataset
from shoal.run.caller_fork import prepare_fork

torch.set_default_dtype(torch.float64)
torch.set_num_threads(2)
torch.backends.cudnn.benchmark = True
x = torch.randn(400, 400, requires_grad=True)
(x @ x).sum().backward()  # begins threads of OpenMP
X = torch.linspace(-1, 1, 192).view(64, 3).sin()


class Line(shoal.Task):
    def data(self, config):
        return TensorDataset(X, X.sum(1)), TensorDataset(X, X.sum(1))

    def model(self, config):
        return torch.nn.Linear(3, 1)

    def optimizer(self, model, config):
        torch.set_num_threads(2)
        large = torch.ones(400, 400, requires_grad=True)
        (large @ large).sum().backward()  # with several threads, in a worker
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    def loss(self, model, batch):
        return (model(batch[0]).squeeze(1) - batch[1]).square().mean()

    def metrics(self, model, batch):
        with open("seen", "a") as file:
            file.write(f"{torch.get_default_dtype()} {torch.backends.cudnn.benchmark} {os.environ['BEFORE']}\\n")
        return {}


print("unfit to be printed twice", end="")
os.environ["BEFORE"] = "set"
{before}
study = shoal.tune(
    Line(), {"lr": shoal.loguniform(0.01, 0.1)}, metric="valid_loss", mode="min",
    algorithm=shoal.Random(4, epochs=2), devices="cpu:2", directory="study", show_progress=False,
)
assert (x @ x).sum().isfinite()  # the caller's own threads begin again
print(study.best_trial.metrics["valid_loss"], prepare_fork())
"""


def script(folder: Path, before: str = "") -> list[str]:
    (folder / "study.py").write_text(STUDY.replace("{before}", before))
    return [sys.executable, "study.py"]


def run(folder: Path, before: str = "") -> str:
    environment = {**os.environ, "SHOAL_CACHE": str(folder / "cache")}
    done = subprocess.run(
        script(folder, before), cwd=folder, env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The directory of a study whose workers are forks of its caller, and what was printed."""
    folder = tmp_path_factory.mktemp("forked")
    return folder, run(folder)


def test_a_study_is_forked_from_a_caller_that_has_used_threads(forked: tuple[Path, str]) -> None:
    folder, printed = forked
    assert printed.count("unfit") == 1
    assert printed.rstrip().endswith(" None")
    assert set((folder / "seen").read_text().split("\n")) == {"torch.float64 True set", ""}


@pytest.mark.thorough
def test_a_study_learns_the_same_from_a_new_process(forked: tuple[Path, str], tmp_path: Path) -> None:
    printed = run(tmp_path, "threading.Thread(target=threading.Event().wait, daemon=True).start()")
    assert "other threads" in printed
    assert "other threads" not in forked[1]
    losses = [float(each.removeprefix("unfit to be printed twice").split()[0]) for each in (forked[1], printed)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_a_thread_of_python_forbids_a_fork() -> None:
    over = threading.Event()
    thread = threading.Thread(target=over.wait, name="another")
    thread.start()
    try:
        assert prepare_fork() is not None
        assert "another" in str(prepare_fork())
    finally:
        over.set()
        thread.join()


@pytest.mark.parametrize(
    ("context", "name"),
    [
        (torch.inference_mode, "torch.inference_mode"),
        (lambda: torch.autocast("cpu"), "torch.autocast"),
        (lambda: torch.autograd.set_detect_anomaly(True), "detect_anomaly"),
        (lambda: torch.device("cpu"), "torch.device"),
        (lambda: FlopCounterMode(display=False), "a mode for operators"),
    ],
    ids=["inference", "autocast", "anomaly", "device", "operators"],
)
def test_a_context_of_torch_forbids_a_fork(context: Callable[[], AbstractContextManager[object]], name: str) -> None:
    with context():
        assert name in str(prepare_fork())


def test_a_forkserver_of_multiprocessing_forbids_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    for pid, begun in ((None, False), (1, True)):
        monkeypatch.setattr(multiprocessing.forkserver._forkserver, "_forkserver_pid", pid)
        assert ("forkserver" in str(prepare_fork())) is begun


def test_a_python_without_pidfd_forbids_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.pidfd_open")
    assert "pidfd_open" in str(prepare_fork())


@pytest.mark.thorough
def test_a_study_of_a_caller_with_closed_streams(tmp_path: Path) -> None:
    reopened = "; sys.stdout = open('printed', 'w', buffering=1)"
    run(tmp_path, "os.close(0); os.close(1); os.close(2)" + reopened)
    assert (tmp_path / "printed").read_text().rstrip().endswith(" None"), "it was forked"


def test_a_daemonic_process_is_not_forked() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(prepare_fork) == "it is a daemonic process of multiprocessing"


@pytest.mark.thorough
def test_nothing_is_left_when_the_caller_is_killed(tmp_path: Path) -> None:
    before = "Line.loss = lambda self, model, batch: (signal.pause(), model(batch[0]).square().mean())[1]"
    environment = {**os.environ, "SHOAL_CACHE": str(tmp_path / "cache")}
    caller = subprocess.Popen(script(tmp_path, before), cwd=tmp_path, env=environment)
    try:
        process = psutil.Process(caller.pid)
        wait_for(lambda: len(process.children(recursive=True)) >= 2)
        family = process.children(recursive=True)
    finally:
        caller.send_signal(signal.SIGKILL)
        caller.wait()
    assert all(gone(each.pid) for each in family)


@pytest.mark.in_turns(5)
@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
def test_a_forked_server_keeps_the_contract(
    check: Callable[[type[Backend], Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shoal.run.launcher.prepare_fork", lambda: None)
    check(Local, tmp_path)


class TestProcess:
    def test_it_ends_with_the_status_of_its_target(self, tmp_path: Path) -> None:
        with (tmp_path / "log").open("wb") as log:
            process = ForkedProcess(lambda: print("told"), log.fileno(), {})
            assert process.wait() == 0
            assert process.wait() == 0
        assert (tmp_path / "log").read_text() == "told\n"

    def test_an_exception_is_in_the_log(self, tmp_path: Path) -> None:
        def fail() -> None:
            raise ValueError("unheard of")

        with (tmp_path / "log").open("wb") as log:
            assert ForkedProcess(fail, log.fileno(), {}).wait() == 1
        assert "ValueError: unheard of" in (tmp_path / "log").read_text()

    def test_signals_end_it(self, tmp_path: Path) -> None:
        with (tmp_path / "log").open("wb") as log:
            process = ForkedProcess(signal.pause, log.fileno(), {})
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.05)
            process.terminate()
            assert process.wait(10) == -signal.SIGTERM
            process.kill()  # after its end, nothing
