"""Conformance suite for back ends: starts scripted jobs and checks their events."""

import errno
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import cloudpickle

from shoal.core.array import Array, FusionKey, Member
from shoal.core.demand import Profile
from shoal.core.device import Device
from shoal.core.errors import BackendError, StorageFullError, TaskError
from shoal.core.job import Job, JobUpdate, Purpose
from shoal.core.trial import Check, Report, Trial
from shoal.host.pickling import loaded
from shoal.run.base import Backend, Ended, Event, Outcome, Profiled, Proven, Reported, WorkerContext
from shoal.train.control import JobControl

__all__ = [
    "BACKEND_CHECKS",
    "DEVICES",
    "check_backend",
    "check_changes",
    "check_close",
    "check_events",
    "check_failures",
    "check_kill",
    "check_neighbours",
    "check_same_job_twice",
    "check_stop",
    "check_stop_without_effect",
    "check_team",
    "events_until_ended",
    "follow",
    "scripted",
    "scripted_job",
]

MakeBackend = Callable[[WorkerContext], Backend]

Script = Callable[[Job, Device, JobControl], Iterator[Event]]
"""Behaviour of a scripted job: `script(job, device, control)` yields its events."""

_TIMEOUT_SECONDS = 60.0
"""Longest wait for a job of this suite."""

Devices = tuple[Device, Device]

DEVICES: Devices = (Device("cpu:0", "cpu", memory=2**30), Device("cpu:1", "cpu", memory=2**30))
"""Two devices for the jobs of this suite, on machines that a back end does not look at."""


def check_backend(make: MakeBackend, directory: Path, devices: Devices = DEVICES) -> None:
    """Run the whole suite on a back end.

    Args:
        make: Factory of a new back end for a worker context.
        directory: Empty directory for the logs.
        devices: Two devices that the back end knows, for the jobs.

    Raises:
        AssertionError: the contract of `shoal.run.Backend` is broken; the message says where.
    """
    for check in BACKEND_CHECKS:
        check(make, directory / check.__name__, devices)


def check_events(make: MakeBackend, directory: Path, devices: Devices = DEVICES) -> None:
    """A job's events arrive complete, equal and in order; exactly one is an `Ended`, the last one."""
    job = scripted_job("events")
    with scripted(make, directory, _profiles_and_reports) as backend:
        backend.start(job, devices[0])
        events = events_until_ended(backend, ["events"])["events"]
        expected = [*_profiles_and_reports(job, devices[0], JobControl()), Ended("events", Outcome.FINISHED)]
        assert events == expected, f"the job yielded {expected}, the back end delivered {events}"
        extra = backend.poll(0.05)
        assert not extra, f"after a job's end the back end delivered {extra}"


def check_neighbours(make: MakeBackend, directory: Path, devices: Devices = DEVICES) -> None:
    """Two jobs run at once: both report before either has ended, and neither ends before it is stopped."""
    with scripted(make, directory, _reports_until_stopped) as backend:
        backend.start(scripted_job("one"), devices[0])
        backend.start(scripted_job("two"), devices[1])
        reported = {event.job for event in _first_events(backend, jobs=2)}
        assert reported == {"one", "two"}, f"of two running jobs, only {sorted(reported)} reported"
        backend.stop("one")
        backend.stop("two")
        histories = events_until_ended(backend, ["one", "two"])
        assert {history[-1] for history in histories.values()} == {
            Ended("one", Outcome.STOPPED),
            Ended("two", Outcome.STOPPED),
        }


def check_failures(make: MakeBackend, directory: Path, devices: Devices = DEVICES) -> None:
    """An exception of a job ends that job with the outcome and a message that names the cause and the log."""
    with scripted(make, directory, _fails) as backend:
        for name, (error, outcome) in _FAILURES.items():
            backend.start(scripted_job(name), devices[0])
            *earlier, last = events_until_ended(backend, [name])[name]
            assert earlier == [_report(name, 1)], (
                f"before {error!r} the job reported epoch 1, but the back end delivered {earlier}"
            )
            assert isinstance(last, Ended)
            assert last.outcome is outcome, f"{error!r} was translated to {last.outcome!r}, not to {outcome!r}"
            assert str(error) in last.message, f"the message of {error!r} does not name it: {last.message}"
            log = directory / "logs" / f"{name}.log"
            assert str(log) in last.message, f"the message of {error!r} does not name its log: {last.message}"
            assert "Traceback" in log.read_text(), f"the log of {error!r} holds no traceback"
        backend.start(scripted_job("after"), devices[0])
        events = events_until_ended(backend, ["after"])["after"]
        assert events[-1] == Ended("after", Outcome.FINISHED), (
            f"after failures a job that does not fail ended with {events[-1]}"
        )


def check_stop(make: MakeBackend, directory: Path, devices: Devices = DEVICES) -> None:
    """A job that is stopped, however early, does its last work and ends as stopped."""
    with scripted(make, directory, _reports_until_stopped) as backend:
        backend.start(scripted_job("early"), devices[0])
        backend.stop("early")
        events = events_until_ended(backend, ["early"])["early"]
        assert events[-2:] == [_report("early", _CHECKPOINT_EPOCH), Ended("early", Outcome.STOPPED)], (
            f"delivered: {events}"
        )

        backend.start(scripted_job("late"), devices[0])
        _first_events(backend, jobs=1)
        backend.stop("late")
        backend.stop("late")
        events = events_until_ended(backend, ["late"])["late"]
        assert events[-2:] == [_report("late", _CHECKPOINT_EPOCH), Ended("late", Outcome.STOPPED)], (
            f"delivered: {events}"
        )


def check_stop_without_effect(make: MakeBackend, directory: Path, devices: Devices = DEVICES) -> None:
    """Stopping an ended or unknown job changes nothing, also for the next job on its device."""
    with scripted(make, directory, _profiles_and_reports) as backend:
        backend.stop("unknown")
        for name in ("first", "second"):
            backend.start(scripted_job(name), devices[0])
            *_, last = events_until_ended(backend, [name])[name]
            assert last == Ended(name, Outcome.FINISHED), f"the job was never asked to stop and ended with {last}"
            backend.stop(name)
        assert not backend.poll(0.05), "stopping a job that had ended had an effect"


def check_kill(make: MakeBackend, directory: Path, devices: Devices = DEVICES) -> None:
    """A killed job ends at once, as crashed, without its last work; its neighbour and the next job are unaffected."""
    with scripted(make, directory, _reports_until_stopped) as backend:
        backend.kill("unknown")
        backend.start(scripted_job("killed"), devices[0])
        backend.start(scripted_job("other"), devices[1])
        _first_events(backend, jobs=2)
        backend.kill("killed")
        ends: list[Event] = []
        while not ends:
            events = [event for event in backend.poll(_TIMEOUT_SECONDS) if event.job == "killed"]
            assert _report("killed", _CHECKPOINT_EPOCH) not in events, "a killed job did its last work"
            ends = [event for event in events if isinstance(event, Ended)]
        assert [isinstance(end, Ended) and end.outcome for end in ends] == [Outcome.CRASHED], f"it ended with {ends}"
        backend.kill("killed")
        backend.stop("other")
        *_, last = events_until_ended(backend, ["other"])["other"]
        assert last == Ended("other", Outcome.STOPPED), f"the neighbour of a killed job ended with {last}"
        backend.release_device(devices[1].name)
        backend.start(scripted_job("next"), devices[1])
        backend.stop("next")
        *_, last = events_until_ended(backend, ["next"])["next"]
        assert last == Ended("next", Outcome.STOPPED), f"on a released device a job ended with {last}"


def check_changes(make: MakeBackend, directory: Path, devices: Devices = DEVICES) -> None:
    """Changes reach their job, each once and in order, however early; no other job gets them."""
    joining = Member(Trial(7, {"lr": 0.1}, seed=1, data_seed=2), start=0, target=3)
    with scripted(make, directory, _reports_changes) as backend:
        backend.change("unknown", JobUpdate(leave=frozenset({1})))
        backend.start(scripted_job("one"), devices[0])
        backend.start(scripted_job("two"), devices[1])
        backend.change("one", JobUpdate(leave=frozenset({2})))
        backend.change("one", JobUpdate(join=(Array(FusionKey("structure", "data", 32), (joining,)),)))
        received: dict[str, list[Report]] = {"one": [], "two": []}
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while len(received["one"]) < 2:
            assert time.monotonic() < deadline, f"two changes were sent, the job has seen only {received['one']}"
            for event in backend.poll(1.0):
                assert isinstance(event, Reported)
                received[event.job] += event.reports
        for name in ("one", "two"):
            backend.stop(name)
        histories = events_until_ended(backend, ["one", "two"])
        for name, events in histories.items():
            received[name] += [report for event in events if isinstance(event, Reported) for report in event.reports]
        changes = {name: [(report.trial, report.epoch) for report in reports] for name, reports in received.items()}
        assert changes == {"one": [(2, _LEAVE_EPOCH), (7, _JOIN_EPOCH)], "two": []}, (
            f"the jobs saw the changes {changes}"
        )
        backend.change("one", JobUpdate(leave=frozenset({3})))
        backend.start(scripted_job("next"), devices[0])
        backend.stop("next")
        *_, last = events_until_ended(backend, ["next"])["next"]
        assert last == Ended("next", Outcome.STOPPED), f"a change for a job that had ended led to {last}"


def check_team(make: MakeBackend, directory: Path, devices: Devices = DEVICES) -> None:
    """A helper runs beside its leader, which learns its team; each of the two ends without the other."""
    leader = scripted_job("leader")
    helper = Job("helper", leader.arrays, Purpose.ASSIST, assists="leader")
    with scripted(make, directory, _reports_team) as backend:
        backend.start(leader, devices[0])
        backend.start(helper, devices[1])
        backend.change("leader", JobUpdate(team=frozenset({"helper"})))
        seen = _first_events(backend, jobs=2)
        received = {event.job: event.reports[0].metrics["team"] for event in seen if isinstance(event, Reported)}
        assert received == {"leader": 1.0, "helper": -1.0}, f"the jobs saw teams of these sizes: {received}"
        backend.change("leader", JobUpdate(team=frozenset()))
        backend.stop("helper")
        events: list[Event] = []
        deadline = time.monotonic() + _TIMEOUT_SECONDS
        while Ended("helper", Outcome.STOPPED) not in events:
            assert time.monotonic() < deadline, f"a helper was stopped, the back end delivered {events}"
            events += backend.poll(1.0)
        backend.stop("leader")
        events += events_until_ended(backend, ["leader"])["leader"]
        sizes = [event.reports[0].metrics["team"] for event in events if isinstance(event, Reported)]
        assert sizes == [0.0], f"a leader without a helper saw teams of these sizes: {sizes}"
        assert events[-1] == Ended("leader", Outcome.STOPPED), f"a leader that was stopped ended with {events[-1]}"


def check_same_job_twice(make: MakeBackend, directory: Path, devices: Devices = DEVICES) -> None:
    """A job cannot be started while it runs, but can be after it has ended."""
    with scripted(make, directory, _reports_until_stopped) as backend:
        for _ in range(2):
            backend.start(scripted_job("job"), devices[0])
            assert _refuses_to_start(backend, devices[0]), "a running job could be started once more"
            backend.stop("job")
            *_, last = events_until_ended(backend, ["job"])["job"]
            assert last == Ended("job", Outcome.STOPPED), f"the job ended with {last}"


def check_close(make: MakeBackend, directory: Path, devices: Devices = DEVICES) -> None:
    """Closing ends running jobs and may be repeated; a closed back end delivers no event and starts no job."""
    with scripted(make, directory, _reports_until_stopped) as backend:
        backend.start(scripted_job("running"), devices[0])
        _first_events(backend, jobs=1)
        backend.close()
        backend.close()
        backend.stop("running")
        assert not backend.poll(0.05), "a closed back end delivers events"
        assert _refuses_to_start(backend, devices[0]), "a closed back end starts jobs"


BACKEND_CHECKS: tuple[Callable[[MakeBackend, Path, Devices], None], ...] = (
    check_events,
    check_neighbours,
    check_failures,
    check_stop,
    check_stop_without_effect,
    check_kill,
    check_changes,
    check_team,
    check_same_job_twice,
    check_close,
)


def follow(job: Job, device: Device, worker_context: WorkerContext, control: JobControl) -> Iterator[Event]:
    """Run the `Script` that is pickled as the task of the worker context; the runner of scripted jobs."""
    script: Script = loaded(worker_context.task)
    yield from script(job, device, control)


@contextmanager
def scripted(make: MakeBackend, directory: Path, script: Script) -> Iterator[Backend]:
    """Provide a back end whose jobs all run the script; close it at the end."""
    directory.mkdir(parents=True, exist_ok=True)  # a worker makes no study's directory
    backend = make(WorkerContext(directory, cloudpickle.dumps(script), runner=f"{__name__}:{follow.__name__}"))
    try:
        yield backend
    finally:
        backend.close()


def scripted_job(name: str) -> Job:
    """Return a job of one trial, for back ends that use only its id."""
    member = Member(Trial(0, {"lr": 0.1}, seed=1, data_seed=2), start=0, target=3)
    return Job(name, (Array(FusionKey("structure", "data", 32), (member,)),))


def events_until_ended(backend: Backend, jobs: Sequence[str]) -> dict[str, list[Event]]:
    """Poll until each of the jobs has ended; return their events by job.

    Raises:
        AssertionError: a job has not ended in time, or an event followed its end.
    """
    histories: dict[str, list[Event]] = {job: [] for job in jobs}
    open_jobs = set(jobs)
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while open_jobs:
        assert time.monotonic() < deadline, f"no end of {sorted(open_jobs)} in {_TIMEOUT_SECONDS:g} s: {histories}"
        for event in backend.poll(1.0):
            assert event.job in open_jobs, f"an event of a job that is not running: {event}"
            histories[event.job].append(event)
            if isinstance(event, Ended):
                open_jobs.remove(event.job)
    return histories


def _first_events(backend: Backend, jobs: int) -> list[Event]:
    """Return the events until `jobs` different jobs have reported."""
    events: list[Event] = []
    deadline = time.monotonic() + _TIMEOUT_SECONDS
    while len({event.job for event in events}) < jobs:
        assert time.monotonic() < deadline, (
            f"{jobs} jobs should report; in {_TIMEOUT_SECONDS:g} s the back end delivered {events}"
        )
        events += backend.poll(1.0)
    return events


def _refuses_to_start(backend: Backend, device: Device) -> bool:
    try:
        backend.start(scripted_job("job"), device)
    except BackendError:
        return True
    return False


_CHECKPOINT_EPOCH = 1000
"""Epoch that `_reports_until_stopped` reports after a request to stop."""


_LEAVE_EPOCH, _JOIN_EPOCH = 2000, 3000
"""Epochs that `_reports_changes` reports for trials that leave and join."""


def _report(job: str, epoch: int) -> Reported:
    return Reported(job, (Report(0, epoch, {"loss": 1 / epoch}, seconds=0.5),))


def _profiles_and_reports(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    yield Profiled(
        job.id, job.arrays[0].key, Profile({1: 0.001, 8: 0.002}, 40, 10, 2**20, 2**10, compute=0.5, cores=1.0)
    )
    yield Proven(job.id, job.arrays[0].key, {0: 0}, (Check(0, 0, 1, "step, eager", 1e-16),), "differs", step=2)
    for epoch in range(1, 4):
        yield _report(job.id, epoch)


def _reports_until_stopped(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    yield _report(job.id, 1)
    while not control.stopping():
        time.sleep(0.005)
        yield _report(job.id, 2)
    yield _report(job.id, _CHECKPOINT_EPOCH)


def _reports_changes(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    while not control.stopping():
        time.sleep(0.005)
        reports: list[Report] = []
        for change in control.changes():
            assert job.id == "one", f"job {job.id!r} sees {change}"
            reports += (Report(number, _LEAVE_EPOCH) for number in change.leave)
            members = (member for array in change.join for member in array.members)
            reports += (Report(member.trial.number, _JOIN_EPOCH) for member in members)
        yield Reported(job.id, tuple(reports))


def _reports_team(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    """Report the size of each team that the job learns; a helper reports -1 once."""
    if job.purpose is Purpose.ASSIST:
        yield Reported(job.id, (Report(0, 1, {"team": -1.0}),))
    while not control.stopping():
        time.sleep(0.005)
        for change in control.changes():
            if change.team is not None:
                yield Reported(job.id, (Report(0, 1, {"team": float(len(change.team))}),))


class OutOfMemoryError(RuntimeError):
    """Stands for torch's error of this name; back ends recognise it by the name."""


_FAILURES: dict[str, tuple[BaseException, Outcome]] = {
    "raises": (ValueError("no such column"), Outcome.RAISED),
    "exits": (SystemExit("gives up"), Outcome.RAISED),
    "breaks-contract": (TaskError("the loss is not a scalar"), Outcome.REJECTED),
    "fills-memory": (MemoryError("no room"), Outcome.OUT_OF_MEMORY),
    "fills-device": (OutOfMemoryError("tried to allocate 2 GB"), Outcome.OUT_OF_MEMORY),
    "fills-disk": (OSError(errno.ENOSPC, "No space left on device"), Outcome.STORAGE_FULL),
    "fills-journal": (StorageFullError("no room for the checkpoint"), Outcome.STORAGE_FULL),
}


def _fails(job: Job, device: Device, control: JobControl) -> Iterator[Event]:
    yield _report(job.id, 1)
    if job.id in _FAILURES:
        raise _FAILURES[job.id][0]
