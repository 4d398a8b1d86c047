import errno
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from shoal.core.errors import CheckpointError, StorageFullError, TaskError, UnusableTaskError
from shoal.core.event import Outcome
from shoal.host.tracebacks import user_traceback
from shoal.run.run_job import resolve
from shoal.train.failures import outcome_of, record_failure


class OutOfMemoryError(RuntimeError):
    """Exception with the name of torch's."""


class DeviceOutOfMemoryError(OutOfMemoryError):
    """Subclass of an exception with the name of torch's."""


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


def after(error: Exception, earlier: Exception) -> Exception:
    error.__context__ = earlier
    return error


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        pytest.param(ValueError("out of memory"), Outcome.RAISED, id="any exception"),
        pytest.param(RuntimeError("mat1 and mat2 shapes"), Outcome.RAISED, id="any RuntimeError"),
        pytest.param(OSError(errno.ENOENT, "gone"), Outcome.RAISED, id="any OSError"),
        pytest.param(SystemExit(1), Outcome.RAISED, id="SystemExit"),
        pytest.param(TaskError("the loss is not a scalar"), Outcome.REJECTED, id="TaskError"),
        pytest.param(UnusableTaskError("it cannot be loaded"), Outcome.UNUSABLE, id="UnusableTaskError"),
        pytest.param(caused_by(TaskError("data"), MemoryError()), Outcome.REJECTED, id="TaskError outermost"),
        pytest.param(MemoryError(), Outcome.OUT_OF_MEMORY, id="MemoryError"),
        pytest.param(OutOfMemoryError("2 GB"), Outcome.OUT_OF_MEMORY, id="torch.OutOfMemoryError"),
        pytest.param(DeviceOutOfMemoryError("2 GB"), Outcome.OUT_OF_MEMORY, id="its subclass"),
        pytest.param(OSError(errno.ENOMEM, "Cannot allocate memory"), Outcome.OUT_OF_MEMORY, id="ENOMEM"),
        pytest.param(RuntimeError("CUDA error: out of memory\n..."), Outcome.OUT_OF_MEMORY, id="CUDA driver"),
        pytest.param(caused_by(CheckpointError("x"), MemoryError()), Outcome.OUT_OF_MEMORY, id="memory as cause"),
        pytest.param(after(ValueError("x"), MemoryError()), Outcome.RAISED, id="memory as mere context"),
        pytest.param(OSError(errno.ENOSPC, "No space"), Outcome.STORAGE_FULL, id="ENOSPC"),
        pytest.param(OSError(errno.EDQUOT, "Quota"), Outcome.STORAGE_FULL, id="EDQUOT"),
        pytest.param(StorageFullError("no room"), Outcome.STORAGE_FULL, id="StorageFullError"),
        pytest.param(sqlite3.OperationalError("database or disk is full"), Outcome.STORAGE_FULL, id="SQLite"),
        pytest.param(caused_by(CheckpointError("x"), OSError(errno.ENOSPC, "")), Outcome.STORAGE_FULL, id="as cause"),
    ],
)
def test_an_exception_says_how_the_job_ended(error: BaseException, outcome: Outcome) -> None:
    assert outcome_of(error) is outcome


class TestTorch:
    """Messages of torch itself, which may change between versions."""

    def test_memory_of_the_host(self) -> None:
        torch = pytest.importorskip("torch")
        with pytest.raises(RuntimeError) as raised:
            torch.empty(10**15)
        assert outcome_of(raised.value) is Outcome.OUT_OF_MEMORY

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
    @pytest.mark.parametrize("size", [10, 1_000_000])
    def test_a_full_disk_written_to_by_torch(self, size: int) -> None:
        torch = pytest.importorskip("torch")
        with pytest.raises(RuntimeError) as raised:
            torch.save(torch.zeros(size), "/dev/full")
        assert outcome_of(raised.value) is Outcome.STORAGE_FULL

    @pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs the device that is always full")
    def test_a_full_disk_written_to_through_a_file_of_python(self) -> None:
        torch = pytest.importorskip("torch")
        with Path("/dev/full").open("wb", buffering=0) as file, pytest.raises((RuntimeError, OSError)) as raised:
            torch.save(torch.zeros(1_000_000), file)
        assert outcome_of(raised.value) is Outcome.STORAGE_FULL

    def test_memory_of_a_device(self) -> None:
        torch = pytest.importorskip("torch")
        assert outcome_of(torch.OutOfMemoryError("CUDA out of memory.")) is Outcome.OUT_OF_MEMORY


def raised_by(runner: str) -> BaseException:
    """Return the exception of importing a runner, with frames of the package below a frame of this file."""
    with pytest.raises(Exception) as raised:  # noqa: PT011
        resolve(runner)
    return raised.value


def test_frames_of_the_package_before_the_first_of_the_user_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "users_module.py").write_text("def fail():\n    raise ValueError('users')\n\nfail()\n")
    monkeypatch.syspath_prepend(tmp_path)
    error = raised_by("users_module:run")
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # begins in `resolve`, as a job's begins in `perform`
    text = user_traceback(error)
    assert "users_module.py" in text
    assert "run_job.py" not in text
    assert text.startswith("Traceback (most recent call last):")
    assert text.endswith("ValueError: users\n")


def test_frames_of_the_package_between_those_of_the_user_are_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "calls_back.py").write_text(
        "from shoal.run.run_job import resolve\n\ndef outer():\n    resolve('fails_within:run')\n\nouter()\n"
    )
    (tmp_path / "fails_within.py").write_text("raise ValueError('within')\n")
    monkeypatch.syspath_prepend(tmp_path)
    text = user_traceback(raised_by("calls_back:run"))
    assert "calls_back.py" in text
    assert "fails_within.py" in text
    assert "run_job.py" not in text
    assert text.endswith("ValueError: within\n")


def test_a_traceback_of_the_package_alone_is_kept() -> None:
    error = raised_by("no colon")
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next
    assert "run_job.py" in user_traceback(error)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        pytest.param(TaskError("the loss is not a scalar"), "the loss is not a scalar\nLog: job.log", id="rejected"),
        pytest.param(
            caused_by(TaskError("`data` raised"), KeyError("lr")),
            "`data` raised\n\nKeyError: 'lr'\nLog: job.log",
            id="rejected for what the user's code raised",
        ),
        pytest.param(MemoryError("no room"), "MemoryError: no room\nLog: job.log", id="out of memory"),
        pytest.param(ValueError("bad"), "ValueError: bad\nLog: job.log", id="raised"),
    ],
)
def test_the_message_names_what_was_raised_and_the_log(error: Exception, message: str, tmp_path: Path) -> None:
    log = tmp_path / "logs" / "job.log"
    assert record_failure(error, log)[1] == message.replace("job.log", str(log))
    assert type(error).__name__ in log.read_text()


def test_the_translation_imports_no_torch() -> None:
    code = "import sys, shoal.run; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}).returncode == 0
