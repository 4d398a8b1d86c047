"""A study whose devices come and go, and whose jobs hang or run out of memory; scripted, on a clock of its own."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Literal

import pytest
from test_engine import (
    KEY,
    PROFILE,
    Killed,
    Scripted,
    Stage,
    backend,
    brackets,
    cluster,
    four,
    full_if,
    nothing,
    reports,
    well,
)

from shoal.core.demand import Profile
from shoal.core.device import Cluster, Device
from shoal.core.errors import DeviceError, StorageFullError
from shoal.core.job import Job, Purpose
from shoal.core.rows import JobRow, Row, Telemetry, TrialRow
from shoal.core.trial import TrialState
from shoal.host.fleet import Fleet
from shoal.host.monitor import Condition, DeviceProcess
from shoal.journal.client import change_devices
from shoal.journal.requests import pending_requests, write_request
from shoal.journal.writer import Journal
from shoal.plan.cost.history import History
from shoal.plan.schedule.knapsack import WFD
from shoal.results import Study
from shoal.run.base import ArrayFailed, Ended, Event, MemoryMeasured, Outcome, Profiled, SignaturesFound

LOST = Condition(healthy=False, reason="has fallen off the bus")


@dataclass
class Clock:
    """A second passes whenever it is looked at."""

    now: float = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@dataclass
class Sight:
    """A monitor that sees what it is told to, so many times, and then that all is well."""

    see: Callable[[], Mapping[str, Condition]]
    looks: int

    def watch(self, cluster: Cluster) -> None:
        """It looks at all there is."""

    def conditions(self, own: Collection[int]) -> Mapping[str, Condition]:
        assert own, "the engine has a process of its own"
        seen = self.see() if self.looks > 0 else {}
        self.looks -= bool(seen)
        return seen


@dataclass
class Guarded(Stage):
    """A stage whose engines look at devices."""

    monitor: Sight | None = None
    fleet: Fleet | None = None
    reasons: set[str] = field(default_factory=set)

    def run(self, backend: Scripted, *unused: object, retries: int = 2, hang_seconds: float = 300.0) -> None:
        with closing(self.open()) as journal:
            write = journal.write

            def note(rows: Sequence[Row]) -> None:
                self.reasons.update(row.reason for row in rows if isinstance(row, TrialRow))
                write(rows)

            journal.write = note  # type: ignore[method-assign]
            monitor = self.monitor
            engine = self.engine(
                journal,
                backend,
                WFD(),
                retries,
                clock=Clock(),
                hang_seconds=hang_seconds,
                fleet=self.fleet or Fleet(cluster(self.slots)),
                find=find,
                monitor=None if monitor is None else lambda cluster: monitor,
            )
            engine.begin()
            engine.run()

    def profile(self) -> Profile | None:
        """The profiles of `KEY` so far."""
        history = History(self.directory / "history.sqlite")
        return history.get(KEY.structure, KEY.data, KEY.batch_size, "cpu")

    def rows(self) -> list[TrialRow]:
        with closing(self.open()) as journal:
            return journal.trials()

    def ends(self) -> list[tuple[str, str, str]]:
        """Device, outcome and message of the training jobs."""
        with closing(self.open()) as journal:
            return [(job.device, job.outcome, job.message) for job in journal.jobs() if job.purpose is Purpose.TRAIN]


def find(devices: str | Sequence[str]) -> Cluster:
    """A machine with GPUs of two kinds: those of even numbers are larger."""
    nodes = cluster(2).nodes
    if devices == "auto":
        raise DeviceError("nobody looks for devices that are new")
    found = tuple(Device(name, "gpu", 2**31 if int(name.removeprefix("cuda:")) % 2 == 0 else 2**30) for name in devices)
    return Cluster((replace(nodes[0], devices=found),))


def guarded(
    directory: Path, slots: int = 2, see: Callable[[], Mapping[str, Condition]] = dict, looks: int = 500
) -> Guarded:
    stage = four(directory, slots)
    return Guarded(stage.directory, stage.make, stage.space, slots, Sight(see, looks))


def first_device(carrier: Scripted) -> str | None:
    """Of the first training job."""
    return next((carrier.devices[job.id] for job in carrier.started if job.purpose is Purpose.TRAIN), None)


def stuck(*jobs: int) -> Callable[[Job], list[Event]]:
    """Of the training jobs, in the order they start, some say only the first word."""
    started: list[str] = []

    def script(job: Job) -> list[Event]:
        if job.purpose is Purpose.TRAIN:
            started.append(job.id)
            if len(started) - 1 in jobs:
                return list(reports(job))[:1]
        return well(job)

    return script


def complete(stage: Guarded, *, failures: int = 0) -> None:
    assert [(row.state, row.epoch) for row in stage.rows()] == [(TrialState.COMPLETE, 2)] * 4
    assert max(row.failures for row in stage.rows()) == failures


def test_jobs_on_a_lost_device_are_killed_and_start_elsewhere(tmp_path: Path) -> None:
    carrier = backend(stuck(0))
    stage = guarded(tmp_path / "study", see=lambda: {name: LOST} if (name := first_device(carrier)) else {})
    stage.run(carrier)
    complete(stage)
    (device, outcome, message), *others = stage.ends()
    assert outcome == "device lost"
    assert message.startswith(f"{device} is lost: has fallen off the bus\nLog: ")
    assert device not in {other for other, _, _ in others}
    assert carrier.killed == [next(job.id for job in carrier.started if job.purpose is Purpose.TRAIN)]
    assert carrier.released == [device], "once, when nothing ran there any more"


def test_a_job_that_dies_because_its_device_does_is_not_to_blame(tmp_path: Path) -> None:
    """It says so before the monitor is due to look again."""
    dead: list[str] = []

    def script(job: Job) -> list[Event]:
        if job.purpose is Purpose.TRAIN and not dead:
            dead.append(job.id)
            return [Ended(job.id, Outcome.RAISED, "CUDA error: unspecified launch failure")]
        return well(job)

    carrier = backend(script)
    stage = guarded(tmp_path / "study", see=lambda: {name: LOST} if (name := first_device(carrier)) else {})
    stage.run(carrier)
    complete(stage)
    device, outcome, message = stage.ends()[0]
    assert outcome == "device lost"
    assert message == f"{device} is lost: has fallen off the bus\nCUDA error: unspecified launch failure"


def test_a_study_without_a_device_waits_says_why_and_goes_on_when_one_returns(tmp_path: Path) -> None:
    stage = guarded(tmp_path / "study", slots=1, see=lambda: {"cpu:0": LOST}, looks=3)
    stage.run(backend())
    complete(stage)
    assert "no healthy device: cpu:0 is lost: has fallen off the bus" in stage.reasons


def test_a_device_full_of_someone_elses_memory_is_waited_for(tmp_path: Path) -> None:
    full = Condition(processes=(DeviceProcess(4711, "python", 2**30 - 1000),))
    stage = guarded(tmp_path / "study", slots=1, see=lambda: {"cpu:0": full}, looks=12)

    def script(job: Job) -> list[Event]:
        said = well(job)
        return [
            replace(event, profile=replace(PROFILE, member_memory=2**20)) if hasattr(event, "profile") else event
            for event in said
        ]

    stage.run(backend(script))
    complete(stage)
    assert any("cpu:0 has 0 MB free: python (pid 4711) holds 1.1 GB" in reason for reason in stage.reasons)


def test_what_is_too_large_for_the_whole_device_is_not_waited_for(tmp_path: Path) -> None:
    full = Condition(processes=(DeviceProcess(4711, "python", 2**29),))
    stage = guarded(tmp_path / "study", slots=1, see=lambda: {"cpu:0": full})

    def script(job: Job) -> list[Event]:
        large = replace(PROFILE, member_memory=2**31)
        return [replace(event, profile=large) if hasattr(event, "profile") else event for event in well(job)]

    with pytest.raises(DeviceError, match=r"4 trials can never start: can never run here: needs 2.1 GB"):
        stage.run(backend(script))


def test_a_job_that_shows_no_progress_is_killed_and_its_trials_are_tried_alone(tmp_path: Path) -> None:
    stage, carrier = guarded(tmp_path / "study", slots=1), backend(stuck(0))
    stage.run(carrier, hang_seconds=5.0)
    complete(stage, failures=1)
    _, outcome, message = stage.ends()[0]
    assert outcome == "hung"
    assert message.startswith("showed no progress for ")
    assert f"Log: {stage.directory / 'logs'}" in message
    assert carrier.killed == [carrier.trained() and carrier.started[2].id]
    assert [len(members) for members in carrier.trained()] == [4, 1, 1, 1, 1]
    assert any("failed before (hung: showed no progress for" in reason for reason in stage.reasons)


def test_a_job_that_hangs_fails_its_trials_also_if_the_engine_is_killed_before_it_kills_the_job(tmp_path: Path) -> None:
    class Late(Scripted):
        def kill(self, job: str) -> None:
            raise Killed

    stage = guarded(tmp_path / "study", slots=1)
    with pytest.raises(Killed):
        stage.run(Late(stuck(0), at_once=False, on_start=nothing), hang_seconds=5.0)
    carrier = backend()
    stage.run(carrier)
    complete(stage, failures=1)
    _, outcome, message = stage.ends()[0]
    assert outcome == "hung"
    assert message.startswith("showed no progress for ")
    assert [len(members) for members in carrier.trained()] == [1, 1, 1, 1], "each by itself, as after a failure"


def test_a_job_that_hangs_is_killed_also_where_the_disk_is_too_full_to_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kills(rows: Sequence[Row]) -> bool:
        return any(isinstance(row, JobRow) and row.kill is not None for row in rows)

    stage, carrier = guarded(tmp_path / "study", slots=1), backend(stuck(0))
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "write", full_if(kills))
        with pytest.raises(StorageFullError):
            stage.run(carrier, hang_seconds=5.0)
    assert carrier.killed == [carrier.started[2].id]
    stage.run(backend())
    complete(stage)


def request(directory: Path, verb: Literal["add devices", "remove devices"], *devices: str) -> threading.Thread:
    """A user who asks and waits; the request is there when this returns."""
    said: list[object] = []

    def wait() -> None:
        try:
            said.append(change_devices(directory, verb, devices, patience=20.0))
        except DeviceError as error:
            said.append(str(error))

    thread = threading.Thread(target=wait)
    thread.said = said  # type: ignore[attr-defined]
    thread.start()
    while not pending_requests(directory) and thread.is_alive():
        pass
    return thread


def answers(thread: threading.Thread) -> list[object]:
    thread.join(20.0)
    return list(thread.said)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("verb", "devices", "expected"),
    [
        ("remove devices", ["here"], ["not here"]),
        ("remove devices", ["cpu:0", "cpu:0"], "device 'cpu:0' is named twice: cpu:0, cpu:0; name each once"),
        ("remove devices", ["cpu:9"], "device 'cpu:9' is not one of the study's; it has cpu:0, cpu:1"),
        ("add devices", ["cuda:1"], ["cpu:0", "cpu:1", "cuda:1"]),
    ],
)
def test_a_running_study_changes_its_devices_by_request(
    verb: Literal["add devices", "remove devices"], devices: list[str], expected: object, tmp_path: Path
) -> None:
    stage, asked = guarded(tmp_path / "study"), []
    here = ""

    def when(job: Job) -> None:
        nonlocal here
        if job.purpose is Purpose.TRAIN and not asked:
            here = carrier.devices[job.id]
            asked.append(request(stage.directory, verb, *(name.replace("here", here) for name in devices)))

    carrier = backend(stuck(0) if "here" in devices else well, on_start=when)
    stage.run(carrier)
    complete(stage)
    others = [name for name in ("cpu:0", "cpu:1") if name != here]
    assert answers(asked[0]) == [others if expected == ["not here"] else expected]
    assert not pending_requests(stage.directory)
    assert not list((stage.directory / "requests").glob("*"))
    if "here" in devices:
        assert [end[:2] for end in stage.ends()] == [(here, "stopped"), (others[0], "finished")]
        assert carrier.released == [here]
        with closing(stage.open()) as journal:
            record = dict(journal.study["fleet"])
        assert record == {"devices": "auto", "added": [], "removed": [here]}


def test_a_request_that_was_recorded_before_the_engine_was_killed_is_done_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, asked = guarded(tmp_path / "study"), []

    def when(job: Job) -> None:
        if not asked:
            asked.append(write_request(stage.directory, "remove devices", devices=["cpu:1"]))

    def die(*arguments: object) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr("shoal.study.actuation.delete_request", die)
        with pytest.raises(Killed):
            stage.run(backend(on_start=when))
        with closing(stage.open()) as journal:
            record = journal.study["fleet"]
        assert [each.name for each in pending_requests(stage.directory)] == asked
        stage.fleet = Fleet.from_record(record, lambda devices: cluster(2))
        patch.undo()
        stage.run(backend())
    complete(stage)
    with closing(stage.open()) as journal:
        (done,) = journal.interventions()
    assert (done.request, done.verb, done.devices, done.refused) == (asked[0], "remove devices", ("cpu:1",), ())
    assert {device for device, _, _ in stage.ends()} == {"cpu:0"}


def test_a_request_that_its_user_gives_up_is_withdrawn(tmp_path: Path) -> None:
    stage = guarded(tmp_path / "study")

    def interrupt(seconds: float) -> None:
        assert pending_requests(stage.directory)
        raise KeyboardInterrupt

    with closing(stage.open()), pytest.raises(KeyboardInterrupt):
        change_devices(stage.directory, "remove devices", ["cpu:1"], patience=60.0, pause=interrupt)
    assert pending_requests(stage.directory) == []


def test_an_engine_that_is_busy_is_still_asked_when_its_user_has_waited_long_enough(tmp_path: Path) -> None:
    stage = guarded(tmp_path / "study")
    with closing(stage.open()), pytest.raises(DeviceError, match=r"within 0.1 s; the request stays pending"):
        change_devices(stage.directory, "remove devices", ["cpu:1"], patience=0.1)
    assert [each.verb for each in pending_requests(stage.directory)] == ["remove devices"]


def test_devices_are_changed_while_nobody_runs_the_study_and_trials_go_on_there(tmp_path: Path) -> None:
    """Pending requests are carried out in order on resume; invalid requests are refused earlier."""
    stage = guarded(tmp_path / "study")

    def die(job: Job) -> None:
        if job.purpose is Purpose.TRAIN:
            raise Killed

    with pytest.raises(Killed):
        stage.run(backend(on_start=die))
    study = Study(stage.directory)
    assert study.remove_devices("cpu:0") == ["cpu:1"]
    with pytest.raises(DeviceError, match="device 'cpu:0' was removed before; the study has cpu:1"):
        study.remove_devices(["cpu:0"])
    assert study.add_devices("cuda:1") == ["cpu:1", "cuda:1"]
    assert study.remove_devices(["cpu:1", "cuda:1"]) == []
    assert study.add_devices("cuda:1") == ["cuda:1"]
    stage.run(backend())
    complete(stage)
    assert {device for device, outcome, _ in stage.ends() if outcome == "finished"} == {"cuda:1"}
    with closing(stage.open()) as journal:
        done = [(each.verb, each.devices, each.refused) for each in journal.interventions()]
    assert done == [
        ("remove devices", ("cpu:0",), ()),
        ("add devices", ("cuda:1",), ()),
        ("remove devices", ("cpu:1", "cuda:1"), ()),
        ("add devices", ("cuda:1",), ()),
    ]
    with pytest.raises(DeviceError, match="has ended, and needs no other devices"):
        study.add_devices("cpu:0")


def test_an_array_that_runs_out_of_memory_is_tried_again_in_halves_of_which_more_is_expected(tmp_path: Path) -> None:
    stage = guarded(tmp_path / "study", slots=1)

    def script(job: Job) -> list[Event]:
        if job.purpose is Purpose.TRAIN and len(job.members) > 2:
            return [Ended(job.id, Outcome.OUT_OF_MEMORY, "tried to allocate 2 GB\nLog: here")]
        return well(job)

    carrier = backend(script)
    stage.run(carrier, retries=0)
    complete(stage, failures=1)
    assert [len(members) for members in carrier.trained()] == [4, 2, 2]
    profile = stage.profile()
    assert profile == replace(PROFILE, member_memory=2)
    assert any(
        "failed before (out of memory: tried to allocate 2 GB), is tried again among at most 2; log: here" in reason
        for reason in stage.reasons
    )


def test_what_a_process_held_when_it_ran_out_is_expected_from_then_on(tmp_path: Path) -> None:
    stage = guarded(tmp_path / "study", slots=1)

    def script(job: Job) -> list[Event]:
        if job.purpose is Purpose.TRAIN and len(job.members) > 2:
            held = MemoryMeasured(job.id, {KEY: 4}, 400)
            return [held, Ended(job.id, Outcome.OUT_OF_MEMORY, "tried to allocate 2 GB")]
        return well(job)

    stage.run(backend(script))
    complete(stage, failures=1)
    profile = stage.profile()
    assert profile is not None
    assert profile.member_memory >= 100


def test_memory_far_above_the_profile_raises_it_while_the_job_runs(tmp_path: Path) -> None:
    stage = guarded(tmp_path / "study", slots=1)

    def script(job: Job) -> list[Event]:
        said = well(job)
        return [MemoryMeasured(job.id, {KEY: 4}, 4000), *said] if job.purpose is Purpose.TRAIN else said

    stage.run(backend(script))
    complete(stage)
    profile = stage.profile()
    assert profile == replace(PROFILE, member_memory=1000)


def test_a_trial_that_runs_out_of_a_whole_device_has_failed_and_is_told_what_would_help(tmp_path: Path) -> None:
    stage = guarded(tmp_path / "study", slots=1)

    def script(job: Job) -> list[Event]:
        if job.purpose is Purpose.TRAIN and any(member.trial.number == 3 for member in job.members):
            return [Ended(job.id, Outcome.OUT_OF_MEMORY, "tried to allocate 2 GB")]
        return well(job)

    carrier = backend(script)
    stage.run(carrier)
    rows = stage.rows()
    assert [row.state for row in rows] == [TrialState.COMPLETE] * 3 + [TrialState.FAILED]
    assert rows[3].reason.startswith("out of memory by itself on cpu:0, which has 1.1 GB; a smaller batch")
    assert rows[3].reason.endswith("tried to allocate 2 GB")
    assert [len(members) for members in carrier.trained() if members[-1].trial.number == 3] == [4, 2, 1]


def test_a_trial_that_runs_out_of_a_small_device_is_tried_on_a_larger_one(tmp_path: Path) -> None:
    stage = guarded(tmp_path / "study")
    stage.fleet = Fleet(find(["cuda:1", "cuda:2"]))
    small: list[str] = []

    def script(job: Job) -> list[Event]:
        if job.purpose is Purpose.SIGNATURE:
            keys = {m.trial.number: replace(KEY, structure=f"net {m.trial.number}") for m in job.members}
            return [SignaturesFound(job.id, keys), Ended(job.id, Outcome.FINISHED)]
        if job.purpose is Purpose.PROFILE:
            return [*(Profiled(job.id, x.key, PROFILE) for x in job.arrays), Ended(job.id, Outcome.FINISHED)]
        return well(job)

    carrier = backend(script)
    start = carrier.start

    def where(job: Job, device: Device) -> None:
        start(job, device)
        if job.purpose is Purpose.TRAIN and device.name == "cuda:1":
            small.append(job.id)
            carrier._events[job.id] = [Ended(job.id, Outcome.OUT_OF_MEMORY, "no room")]

    carrier.start = where  # type: ignore[method-assign]
    stage.run(carrier)
    complete(stage, failures=max(row.failures for row in stage.rows()))
    assert small, "some began on the small one"


def test_why_an_array_was_dropped_stays_in_the_journal_and_with_the_trials_that_wait(tmp_path: Path) -> None:
    stage, dropped = guarded(tmp_path / "study", slots=1), []

    def script(job: Job) -> list[Event]:
        if job.purpose is Purpose.TRAIN and not dropped:
            dropped.append(job.id)
            numbers = frozenset(member.trial.number for member in job.members[:2])
            rest = replace(job, arrays=(replace(job.arrays[0], members=job.members[2:]),))
            message = "Traceback ...\nRuntimeError: planted\nLog: logs/job.log"
            return [
                ArrayFailed(job.id, numbers, Outcome.RAISED, message),
                *reports(rest),
                Ended(job.id, Outcome.FINISHED),
            ]
        return well(job)

    stage.run(backend(script))
    complete(stage, failures=1)
    assert stage.ends()[0][1:] == (
        "finished",
        "dropped trials 0, 1: raised: Traceback ...\nRuntimeError: planted\nLog: logs/job.log",
    )
    story = "failed before (raised: RuntimeError: planted), is tried again by itself (try 2 of 3); log: logs/job.log"
    assert any(reason.endswith(story) for reason in stage.reasons)


@pytest.mark.parametrize(("message", "jobs"), [("ValueError: bad", 2), ("ValueError: {}", 6)])
def test_the_same_error_twice_by_itself_is_not_tried_a_third_time(message: str, jobs: int, tmp_path: Path) -> None:
    stage = guarded(tmp_path / "study", slots=1)
    tried: list[str] = []

    def script(job: Job) -> list[Event]:
        if job.purpose is Purpose.TRAIN and any(member.trial.number == 1 for member in job.members):
            tried.append(job.id)
            return [Ended(job.id, Outcome.RAISED, message.format(len(tried)))]
        return well(job)

    stage.run(backend(script), retries=6)
    assert len(tried) - 1 == jobs
    assert stage.rows()[1].state is TrialState.FAILED
    assert ("twice alike at epoch 0:\nValueError: bad" in stage.rows()[1].reason) == (jobs == 2)


def test_a_study_on_a_full_disk_winds_up_without_recording_its_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(job: Job) -> list[Event]:
        if len(carrier.trained()) == 2:
            return [Ended(job.id, Outcome.STORAGE_FULL, "no room for a checkpoint")]
        return well(job)

    two = brackets(tmp_path / "study")
    carrier, stage = backend(script), Guarded(two.directory, two.make, two.space, 2, Sight(dict, 0))
    ended: list[JobRow] = []

    def after_the_end(rows: Sequence[Row]) -> bool:
        full = bool(ended)
        ended.extend(row for row in rows if isinstance(row, JobRow) and row.outcome == Outcome.STORAGE_FULL)
        return full

    monkeypatch.setattr(Journal, "write", full_if(after_the_end))
    with pytest.raises(StorageFullError, match="no room for a checkpoint"):
        stage.run(carrier)
    assert len(carrier.trained()) == 2
    assert carrier.stopped, "the other job saved its trials"


def test_the_end_of_a_job_is_heard_though_its_devices_cannot_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(job: Job) -> list[Event]:
        return [Ended(job.id, Outcome.CRASHED, "died")] if job.purpose is Purpose.TRAIN else well(job)

    def when_it_has_died(rows: Sequence[Row]) -> bool:
        polled = carrier.trained() and not any(carrier._events.values())  # its end is about to be handled
        return bool(polled) and any(isinstance(row, Telemetry) for row in rows)

    looks = count()
    stage = guarded(tmp_path / "study", slots=1, see=lambda: {"cpu:0": Condition(memory_used=next(looks))})
    carrier = backend(script)
    monkeypatch.setattr(Journal, "write", full_if(when_it_has_died))
    monkeypatch.setattr(carrier, "stop", lambda job: None)  # a job that has ended is left alone
    with pytest.raises(StorageFullError, match="no room for the journal"):
        stage.run(carrier)
    assert len(carrier.trained()) == 1
    assert not carrier.killed, "nobody waits until it would hang"


def test_the_other_jobs_are_waited_for_though_the_end_of_one_on_a_full_disk_cannot_be_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard: list[str] = []

    def script(job: Job) -> list[Event]:
        if len(carrier.trained()) == 2:
            return [Ended(job.id, Outcome.STORAGE_FULL, "no room for a checkpoint")]
        return well(job)

    def job_ended(rows: Sequence[Row]) -> bool:
        return len(carrier.trained()) == 2 and any(isinstance(row, JobRow) and row.ended is not None for row in rows)

    def poll(timeout: float) -> list[Event]:
        events = say(timeout)
        heard.extend(event.job for event in events if isinstance(event, Ended))
        return events

    two = brackets(tmp_path / "study")
    carrier, stage = backend(script), Guarded(two.directory, two.make, two.space, 2, Sight(dict, 0))
    say = carrier.poll
    monkeypatch.setattr(Journal, "write", full_if(job_ended))
    monkeypatch.setattr(carrier, "poll", poll)
    with pytest.raises(StorageFullError, match="no room for the journal"):
        stage.run(carrier)
    assert len(carrier.trained()) == 2
    assert {job.id for job in carrier.started} == set(heard), "the other job saved its trials, and ended"
