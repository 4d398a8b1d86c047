from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.core.device import Device
from shoal.core.errors import BackendError
from shoal.core.job import Job
from shoal.run import Ended, Event, Inline, Outcome, Reported, WorkerContext
from shoal.testing.backends import events_until_ended, scripted, scripted_job
from shoal.train.control import JobControl

CPU = Device("cpu:0", "cpu", memory=2**30)


def two_reports(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    yield Reported(job.id, ())
    yield Reported(job.id, ())


def interrupted(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    yield Reported(job.id, ())
    if job.id == "a":
        raise KeyboardInterrupt
    yield Reported(job.id, ())


def user_code() -> None:
    raise ValueError("no such column")


def raises_in_user_code(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    yield Reported(job.id, ())
    user_code()


def test_jobs_take_turns_event_by_event(tmp_path: Path) -> None:
    with scripted(Inline, tmp_path, two_reports) as backend:
        backend.start(scripted_job("a"), CPU)
        backend.start(scripted_job("b"), CPU)
        polls = [backend.poll(0.0) for _ in range(6)]
    assert [[event.job for event in events] for events in polls] == [["a"], ["b"]] * 3
    assert [events[0] for events in polls[4:]] == [Ended("a", Outcome.FINISHED), Ended("b", Outcome.FINISHED)]


def test_starting_runs_nothing_of_the_job(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    def script(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
        ran.touch()
        yield Reported(job.id, ())

    with scripted(Inline, tmp_path, script) as backend:
        backend.start(scripted_job("a"), CPU)
        assert not ran.exists()
        backend.poll(0.0)
        assert ran.exists()


def test_an_interrupt_of_the_keyboard_goes_through_and_ends_its_job_alone(tmp_path: Path) -> None:
    with scripted(Inline, tmp_path, interrupted) as backend:
        backend.start(scripted_job("a"), CPU)
        backend.start(scripted_job("b"), CPU)
        assert backend.poll(0.0) + backend.poll(0.0) == [Reported("a", ()), Reported("b", ())]
        with pytest.raises(KeyboardInterrupt):
            backend.poll(0.0)
        histories = events_until_ended(backend, ["a", "b"])
    (end,) = histories["a"]
    assert isinstance(end, Ended)
    assert end.outcome is Outcome.CRASHED
    assert "interrupted" in end.message
    assert histories["b"] == [Reported("b", ()), Ended("b", Outcome.FINISHED)]


def test_closing_runs_the_finally_blocks_of_the_job(tmp_path: Path) -> None:
    freed = tmp_path / "freed"

    def script(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
        try:
            while True:
                yield Reported(job.id, ())
        finally:
            freed.touch()

    with scripted(Inline, tmp_path, script) as backend:
        backend.start(scripted_job("a"), CPU)
        backend.poll(0.0)
        backend.close()
        assert freed.exists()


def test_the_message_holds_the_traceback_of_the_user_and_the_log_all_of_it(tmp_path: Path) -> None:
    with scripted(Inline, tmp_path, raises_in_user_code) as backend:
        backend.start(scripted_job("job"), CPU)
        *_, end = events_until_ended(backend, ["job"])["job"]
    assert isinstance(end, Ended)
    assert 'raise ValueError("no such column")' in end.message
    assert "run_job.py" not in end.message
    assert "run_job.py" in (tmp_path / "logs" / "job.log").read_text()


@pytest.mark.parametrize(
    ("runner", "message"),
    [
        pytest.param("no_such_module:run", "'no_such_module:run' cannot be imported: No module", id="no module"),
        pytest.param("shoal.run:no_such_name", "cannot be imported: .* no attribute", id="no function"),
        pytest.param("shoal.run:BACKENDS", "cannot be called, it is of type dict", id="no callable"),
        pytest.param("shoal.run", 'given as "module:function", got', id="no colon"),
    ],
)
def test_a_runner_that_cannot_be_used_is_an_error_at_once(runner: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(BackendError, match=message):
        Inline(WorkerContext(tmp_path, b"", runner=runner))
