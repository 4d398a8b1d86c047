import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle
import local_scripts as scripts
import psutil
import pytest
from processes import alive, gone, reaped, wait_for

from shoal.core.device import Device
from shoal.core.errors import BackendError
from shoal.run import Backend, Ended, Event, Local, Outcome, Reported, WorkerContext
from shoal.testing.backends import Script, events_until_ended, scripted, scripted_job
from shoal.train.control import JobControl


@pytest.fixture(autouse=True)
def new_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server is a new process, whichever modules and threads the tests' own process has by now."""
    monkeypatch.setattr("shoal.run.launcher.prepare_fork", lambda: "the test asks for a new process")


CPU = Device("cpu:0", "cpu", memory=2**30)
OTHER_CPU = Device("cpu:1", "cpu", memory=2**30)


@contextmanager
def local(directory: Path, script: Script) -> Iterator[Backend]:
    with scripted(Local, directory, script) as backend:
        yield backend


def metrics(event: Event) -> dict[str, int]:
    assert isinstance(event, Reported), event
    return {name: int(value) for name, value in event.reports[0].metrics.items()}


def first_metrics(backend: Backend) -> dict[str, int]:
    (event,) = backend.poll(60.0)
    return metrics(event)


def run(backend: Backend, job: str, device: Device = CPU) -> list[Event]:
    backend.start(scripted_job(job), device)
    return events_until_ended(backend, [job])[job]


def ended(event: Event) -> Ended:
    assert isinstance(event, Ended), event
    return event


def kill_the_server(backend: Local) -> None:
    """Before it is ready, as its runner is still imported; wait for the next one."""
    killed = backend._server.pid
    assert not backend._server.ready
    os.kill(killed, signal.SIGKILL)

    def is_replaced() -> bool:
        assert backend.poll(1.0) == []
        return backend._server.pid != killed

    wait_for(is_replaced)


def another_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What begins from now on has a server of its own."""
    monkeypatch.setenv("ANOTHER", str(time.monotonic_ns()))


def vanish(pids: list[int]) -> bool:
    return all(map(gone, pids))


class TestWorkers:
    def test_a_worker_is_kept_for_the_next_job_on_its_device_until_one_fails(self, tmp_path: Path) -> None:
        with local(tmp_path, scripts.returns) as backend:
            first, second, elsewhere, bad, after = (
                metrics(run(backend, job, device)[0])["worker"]
                for job, device in [("a", CPU), ("b", CPU), ("c", OTHER_CPU), ("bad", CPU), ("d", CPU)]
            )
        assert first == second == bad
        assert elsewhere != first
        assert after not in (first, elsewhere)

    def test_two_jobs_on_one_device_have_a_process_each(self, tmp_path: Path) -> None:
        with local(tmp_path, scripts.waits) as backend:
            backend.start(scripted_job("a"), CPU)
            one = first_metrics(backend)
            backend.start(scripted_job("b"), CPU)
            two = first_metrics(backend)
        assert one["worker"] != two["worker"]
        assert one["server"] == two["server"]

    def test_a_job_that_is_resumed_goes_to_the_process_that_had_it(self, tmp_path: Path) -> None:
        with local(tmp_path, scripts.waits) as backend:
            found: dict[str, int] = {}
            for name in ("a", "b"):
                backend.start(scripted_job(name), CPU)
                found[name] = first_metrics(backend)["worker"]
            for name in ("a", "b"):
                backend.stop(name)
            events_until_ended(backend, ["a", "b"])
            backend.start(replace(scripted_job("again"), resumes="b"), CPU)
            assert first_metrics(backend)["worker"] == found["b"]
            backend.start(replace(scripted_job("elsewhere"), resumes="a"), OTHER_CPU)
            assert first_metrics(backend)["worker"] not in found.values()

    def test_an_idle_worker_that_was_killed_is_replaced(self, tmp_path: Path) -> None:
        with local(tmp_path, scripts.returns) as backend:
            first = metrics(run(backend, "a")[0])["worker"]
            os.kill(first, signal.SIGKILL)
            assert reaped(first)
            events = run(backend, "b")
        assert metrics(events[0])["worker"] != first
        assert events[-1] == Ended("b", Outcome.FINISHED)

    def test_a_failed_job_ends_when_its_process_is_gone_and_its_memory_free(self, tmp_path: Path) -> None:
        with local(tmp_path, scripts.returns) as backend:
            report, end = run(backend, "bad")
            assert ended(end).outcome is Outcome.RAISED
            assert not psutil.pid_exists(metrics(report)["worker"])

    def test_starting_waits_for_no_import_and_for_no_large_task(self, tmp_path: Path, gate: Path) -> None:
        ballast = bytes(50_000_000)

        def script(job: object, device: Device, control: JobControl) -> Iterator[Event]:
            yield Reported(str(len(ballast)), ())

        worker_context = WorkerContext(tmp_path, cloudpickle.dumps(script), runner="slow_runner:follow")
        backend = Local(worker_context)
        try:
            backend.start(scripted_job("job"), CPU)
            assert backend.poll(0.0) == []
            with gate.open("r+b", buffering=0):
                assert backend.poll(60.0) == [Reported("50000000", ())]
        finally:
            backend.close()

    def test_what_the_server_imported_works_in_its_workers(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("torch")
        monkeypatch.setenv("PYTHONWARNINGS", "always")  # Python 3.12 warns of a fork of several threads
        backend = Local(WorkerContext(tmp_path, b"", runner="torch_runner:run"))
        try:
            for name in ("first", "second"):
                report, end = run(backend, name, Device(name, "cpu", memory=2**30))
                assert metrics(report) == {"torch": 600, "numpy": 300, "cuda_initialized": 0}
                assert end == Ended(name, Outcome.FINISHED)
        finally:
            backend.close()
        assert (tmp_path / "logs" / "server.log").read_text() == ""


class TestCrashes:
    @pytest.mark.parametrize(
        ("script", "reason", "trace"),
        [
            pytest.param(scripts.exits, "exited with status 3", "", id="exit"),
            pytest.param(scripts.reads_address_zero, "was killed by SIGSEGV", "reads_address_zero", id="segfault"),
        ],
    )
    def test_a_crash_ends_the_job_and_its_message_says_how_and_where(
        self, script: Script, reason: str, trace: str, tmp_path: Path
    ) -> None:
        with local(tmp_path, script) as backend:
            report, end = run(backend, "job")
        log = tmp_path / "logs" / "job.log"
        message = f"worker process {metrics(report)['worker']} {reason}\nLog: {log}"
        assert end == Ended("job", Outcome.CRASHED, message)
        assert trace in log.read_text()

    def test_a_killed_worker_is_noticed_and_its_neighbour_runs_on(self, tmp_path: Path) -> None:
        with local(tmp_path, scripts.waits) as backend:
            backend.start(scripted_job("neighbour"), CPU)
            first_metrics(backend)
            backend.start(scripted_job("job"), CPU)
            worker = first_metrics(backend)["worker"]
            os.kill(worker, signal.SIGKILL)
            (end,) = backend.poll(60.0)
            assert ended(end).job == "job"
            assert ended(end).outcome is Outcome.CRASHED
            assert f"worker process {worker} was killed by SIGKILL (out of memory?)" in ended(end).message
            backend.stop("neighbour")
            assert events_until_ended(backend, ["neighbour"])["neighbour"] == [Ended("neighbour", Outcome.STOPPED)]

    def test_what_was_reported_before_a_crash_is_delivered_before_its_end(self, tmp_path: Path) -> None:
        with local(tmp_path, scripts.reports_and_dies) as backend:
            backend.start(scripted_job("job"), CPU)
            log = tmp_path / "logs" / "job.log"
            wait_for(lambda: log.exists() and log.read_text().endswith("\n"))
            assert gone(int(log.read_text()))
            *reports, end = events_until_ended(backend, ["job"])["job"]
        assert [metrics(report)["number"] for report in reports] == list(range(50))
        assert ended(end).outcome is Outcome.CRASHED

    def test_a_crash_takes_the_processes_that_the_job_started_with_it(self, tmp_path: Path) -> None:
        with local(tmp_path, scripts.waits_with_child) as backend:
            backend.start(scripted_job("job"), CPU)
            pids = first_metrics(backend)
            os.kill(pids["worker"], signal.SIGKILL)
            (end,) = backend.poll(60.0)
            assert ended(end).outcome is Outcome.CRASHED
            assert vanish([pids["child"]])

    def test_when_the_server_is_killed_its_jobs_are_lost_without_blame_and_the_next_gets_a_new_one(
        self, tmp_path: Path
    ) -> None:
        with local(tmp_path, scripts.waits) as backend:
            old: dict[str, dict[str, int]] = {}
            for name in ("one", "two"):
                backend.start(scripted_job(name), CPU)
                old[name] = first_metrics(backend)
            os.kill(old["one"]["server"], signal.SIGKILL)
            for name, (end,) in events_until_ended(backend, ["one", "two"]).items():
                assert ended(end).outcome is Outcome.ORPHANED
                assert "the server of its worker process was killed by SIGKILL" in ended(end).message
                assert not alive(old[name]["worker"]), "a job that has ended holds its device no more"
            backend.start(scripted_job("one"), CPU)
            assert first_metrics(backend)["server"] != old["one"]["server"]

    @pytest.mark.parametrize("script", [scripts.holds_the_interpreter, scripts.waits_with_child], ids=["GIL", "child"])
    def test_nothing_is_left_of_the_jobs_of_a_server_that_was_killed(self, script: Script, tmp_path: Path) -> None:
        with local(tmp_path, script) as backend:
            backend.start(scripted_job("job"), CPU)
            pids = first_metrics(backend)
            os.kill(pids["server"], signal.SIGKILL)
            (end,) = events_until_ended(backend, ["job"])["job"]
            assert ended(end).outcome is Outcome.ORPHANED
            assert not any(map(alive, pids.values()))

    def test_a_job_started_while_the_server_is_dead_is_lost_likewise(self, tmp_path: Path) -> None:
        with local(tmp_path, scripts.waits) as backend:
            backend.start(scripted_job("job"), CPU)
            server = first_metrics(backend)["server"]
            os.kill(server, signal.SIGKILL)
            assert vanish([server])
            backend.start(scripted_job("late"), CPU)
            histories = events_until_ended(backend, ["job", "late"])
        assert [ended(history[-1]).outcome for history in histories.values()] == [Outcome.ORPHANED] * 2

    def test_a_server_that_is_killed_while_it_starts_is_replaced_but_not_for_ever(
        self, tmp_path: Path, gate: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def slow(name: str) -> closing[Local]:
            script = cloudpickle.dumps(scripts.waits)
            return closing(Local(WorkerContext(tmp_path / name, script, runner="slow_runner:follow")))

        with slow("sometimes") as backend:
            for _ in range(4):
                kill_the_server(backend)
            with gate.open("r+b", buffering=0):
                backend.start(scripted_job("job"), CPU)
                assert first_metrics(backend)["server"] > 0
        another_environment(monkeypatch)
        with slow("again and again") as backend:
            for _ in range(4):
                kill_the_server(backend)
            with pytest.raises(BackendError, match=r"was killed by SIGKILL .* before it could start a worker.* 5 in a"):
                kill_the_server(backend)

    def test_jobs_that_kill_their_server_again_and_again_end_that(self, tmp_path: Path) -> None:
        with local(tmp_path, scripts.kills_its_server) as backend:
            for _ in range(4):
                backend.start(scripted_job("job"), CPU)
                assert ended(events_until_ended(backend, ["job"])["job"][-1]).outcome is Outcome.ORPHANED
            backend.start(scripted_job("job"), CPU)
            with pytest.raises(BackendError, match=r"was killed by SIGKILL .*5 in a row have, and no job ended in bet"):
                events_until_ended(backend, ["job"])
            assert ended(backend.poll(0.0)[-1]).outcome is Outcome.ORPHANED

    @pytest.mark.parametrize(
        ("runner", "message"),
        [
            pytest.param("no_such_module:run", "No module named 'no_such_module'", id="no module"),
            pytest.param("local_scripts:no_such_function", "no_such_function", id="no function"),
            pytest.param("local_scripts", 'a runner is given as "module:function"', id="no colon"),
        ],
    )
    def test_a_runner_that_cannot_be_imported_is_an_error_with_the_end_of_the_log(
        self, runner: str, message: str, tmp_path: Path
    ) -> None:
        backend = Local(WorkerContext(tmp_path, b"", runner=runner))
        try:
            with pytest.raises(BackendError, match=message) as raised:
                backend.poll(60.0)
            assert str(tmp_path / "logs" / "server.log") in str(raised.value)
            assert "exited with status 1 before it could start a worker" in str(raised.value)
        finally:
            backend.close()


class TestSignals:
    def test_workers_and_server_ignore_the_interrupt_of_the_keyboard(self, tmp_path: Path) -> None:
        with local(tmp_path, scripts.waits) as backend:
            backend.start(scripted_job("job"), CPU)
            pids = first_metrics(backend)
            for pid in pids.values():
                assert os.getpgid(pid) != os.getpgid(0), "a terminal signals the engine's process group"
                os.kill(pid, signal.SIGINT)
            assert backend.poll(0.2) == []
            backend.stop("job")
            assert events_until_ended(backend, ["job"])["job"] == [Ended("job", Outcome.STOPPED)]


class TestEnd:
    @pytest.mark.parametrize(
        "script",
        [scripts.waits, scripts.waits_with_child, scripts.holds_the_interpreter],
        ids=["waits", "with a child", "holds the GIL"],
    )
    def test_closing_ends_all_workers_and_leaves_no_zombie(self, script: Script, tmp_path: Path) -> None:
        with local(tmp_path, script) as backend:
            backend.start(scripted_job("job"), CPU)
            pids = first_metrics(backend)
            begin = time.monotonic()
            backend.close()
            assert time.monotonic() - begin < 60.0, "closing waits for no job"
            server = pids.pop("server")
            assert vanish(list(pids.values()))
            assert not psutil.pid_exists(pids["worker"])
            assert psutil.Process(server).children() == []

    def test_the_next_study_has_the_server_of_the_last_and_nothing_else_of_it(self, tmp_path: Path) -> None:
        servers = set()
        for name, script in [("first", scripts.returns), ("second", scripts.waits), ("third", scripts.returns)]:
            with local(tmp_path / name, script) as backend:
                backend.start(scripted_job("job"), CPU)
                pids = first_metrics(backend)
                servers.add(pids["server"])
            assert vanish([pids["worker"]])
        assert len(servers) == 1
        assert {path.name for path in (tmp_path / "third" / "logs").iterdir()} == {"server.log", "job.log"}

    def test_a_server_without_a_study_holds_nothing_of_the_last(self, tmp_path: Path) -> None:
        with local(tmp_path, scripts.returns) as backend:
            server = psutil.Process(metrics(run(backend, "job")[0])["server"])
            assert [Path(file.path) for file in server.open_files()] == [tmp_path / "logs" / "server.log"] * 2
        assert server.open_files() == []
        assert server.cwd() == "/"

    def test_the_next_study_imports_from_its_own_working_directory(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.syspath_prepend("lib")
        for value in (1, 2):
            lib = tmp_path / str(value) / "lib"
            lib.mkdir(parents=True)
            (lib / "whereabouts.py").write_text(f"VALUE = {value}")
            monkeypatch.chdir(lib.parent)
            with local(tmp_path / "study", scripts.imports) as backend:
                assert metrics(run(backend, "job")[0]) == {"value": value}

    def test_a_study_runs_from_a_working_directory_that_was_removed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gone = tmp_path / "gone"
        gone.mkdir()
        monkeypatch.chdir(gone)
        gone.rmdir()
        for name in ("first", "second"):
            with local(tmp_path / name, scripts.returns) as backend:
                assert ended(run(backend, "job")[-1]).outcome is Outcome.FINISHED

    def test_a_change_of_the_environment_or_of_the_module_path_needs_another_server(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def server(name: str) -> int:
            with local(tmp_path / name, scripts.returns) as backend:
                return metrics(run(backend, "job")[0])["server"]

        one = server("one")
        another_environment(monkeypatch)
        two = server("two")
        assert not psutil.pid_exists(one)
        monkeypatch.syspath_prepend(str(tmp_path))
        assert len({one, two, server("three")}) == 3

    @pytest.mark.parametrize(
        ("change", "undo"),
        [
            pytest.param(lambda: os.umask(0o077), os.umask, id="umask"),
            pytest.param(
                lambda: (cores := os.sched_getaffinity(0), os.sched_setaffinity(0, {min(cores)}))[0],
                lambda cores: os.sched_setaffinity(0, cores),
                marks=pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is one core"),
                id="cores",
            ),
        ],
    )
    def test_workers_have_the_umask_and_the_cores_of_the_process_that_runs_their_study(
        self, change: Callable[[], Any], undo: Callable[[Any], object], tmp_path: Path
    ) -> None:
        with local(tmp_path / "first", scripts.inherits) as backend:
            first = metrics(run(backend, "job")[0])
        before = change()
        try:
            with local(tmp_path / "second", scripts.inherits) as backend:
                second = metrics(run(backend, "job")[0])
        finally:
            undo(before)
        assert first != second

    def test_a_server_that_died_after_its_study_is_replaced(self, tmp_path: Path) -> None:
        with local(tmp_path / "first", scripts.returns) as backend:
            server = metrics(run(backend, "job")[0])["server"]
        os.kill(server, signal.SIGKILL)
        with local(tmp_path / "second", scripts.returns) as backend:
            assert metrics(run(backend, "job")[0])["server"] != server

    def test_closing_does_not_wait_for_the_imports_of_the_server(self, tmp_path: Path, gate: Path) -> None:
        backend = Local(WorkerContext(tmp_path, b"", runner="slow_runner:follow"))
        server = backend._server.pid
        backend.close()
        assert gone(server)
        assert gate.is_fifo(), "nobody has opened it"

    def test_a_back_end_that_is_dropped_ends_its_processes(self, tmp_path: Path) -> None:
        dropped = Local(
            WorkerContext(tmp_path, cloudpickle.dumps(scripts.waits), runner="shoal.testing.backends:follow")
        )
        dropped.start(scripted_job("job"), CPU)
        pids = first_metrics(dropped)
        del dropped
        gc.collect()
        assert vanish(list(pids.values()))


ENGINE = """
import os, signal, sys, time
from pathlib import Path
import cloudpickle
from shoal.run import Local, WorkerContext
from shoal.core.device import Device
from shoal.testing.backends import events_until_ended, scripted_job
import local_scripts

print("main runs", flush=True)

def in_main(job, device, orders):
    yield local_scripts.pids(job)
    yield from local_scripts.{script}(job, device, orders)

task = cloudpickle.dumps(in_main)
backend = Local(WorkerContext(Path(sys.argv[1]), task, runner="shoal.testing.backends:follow"))
backend.start(scripted_job("job"), Device("cpu:0", "cpu", memory=2**30))
(event,) = backend.poll(60.0)
pids = event.reports[0].metrics
forked = os.fork() if {fork} else 0
if {fork} and forked == 0:
    signal.pause()

def announce():
    print(pids["worker"], pids["server"], forked, flush=True)

{rest}
"""


@contextmanager
def engine(directory: Path, **parts: object) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """An engine in a script without `if __name__ == "__main__"`, and the pids of its worker, server and fork."""
    path = directory / "engine.py"
    path.write_text(ENGINE.format(**{"fork": False, "rest": "announce(); signal.pause()", **parts}))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, str(path), str(directory)],
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
        process_group=0,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "main runs\n", "a second line would be a second run"
            yield process, [int(word) for word in process.stdout.readline().split()]
        finally:
            process.kill()


class TestEngine:
    @pytest.mark.parametrize("script", ["waits", pytest.param("holds_the_interpreter", marks=pytest.mark.thorough)])
    def test_when_the_engine_is_killed_worker_and_server_end(self, script: str, tmp_path: Path) -> None:
        with engine(tmp_path, script=script) as (process, (worker, server, _)):
            assert alive(worker)
            assert alive(server)
            process.kill()
            assert vanish([worker, server])

    def test_a_fork_of_the_engine_does_not_keep_them_alive(self, tmp_path: Path) -> None:
        with engine(tmp_path, script="waits", fork=True) as (process, (worker, server, forked)):
            try:
                process.kill()
                assert vanish([worker, server])
                assert alive(forked)
            finally:
                os.kill(forked, signal.SIGKILL)

    def test_when_engine_and_server_are_killed_the_worker_ends_by_itself(self, tmp_path: Path) -> None:
        with engine(tmp_path, script="waits") as (process, (worker, server, _)):
            os.kill(server, signal.SIGKILL)
            process.kill()
            assert vanish([worker])

    def test_an_interrupt_of_the_terminal_reaches_the_engine_alone(self, tmp_path: Path) -> None:
        rest = """
try:
    announce()
    while True:
        time.sleep(0.05)  # `signal.pause` would sleep on after an interrupt that comes just before it
except KeyboardInterrupt:
    backend.stop("job")
    print(events_until_ended(backend, ["job"])["job"][-1].outcome)
"""
        with engine(tmp_path, script="waits", rest=rest) as (process, _):
            os.killpg(process.pid, signal.SIGINT)
            assert process.stdout is not None
            assert process.stdout.read() == "stopped\n"

    def test_a_script_without_a_guard_and_without_close_runs_once_and_leaves_nothing(self, tmp_path: Path) -> None:
        with engine(tmp_path, script="waits", rest="announce(); print('end')") as (process, (worker, server, _)):
            assert process.stdout is not None
            assert process.stdout.read() == "end\n"
            assert process.wait(30) == 0
            assert vanish([worker, server])


class TestLogs:
    def test_all_output_goes_to_the_log_of_the_job_and_is_appended(self, tmp_path: Path) -> None:
        with local(tmp_path, scripts.prints) as backend:
            run(backend, "one")
            run(backend, "two")
            run(backend, "one")
        lines = [f"one: from {source}" for source in ("print", "stderr", "C", "a child")]
        assert (tmp_path / "logs" / "one.log").read_text().splitlines() == lines * 2
        assert "one" not in (tmp_path / "logs" / "two.log").read_text()

    def test_the_message_holds_the_traceback_of_the_user_and_the_log_all_of_it(self, tmp_path: Path) -> None:
        with local(tmp_path, scripts.raises_in_user_code) as backend:
            *_, end = run(backend, "job")
        log = tmp_path / "logs" / "job.log"
        traceback = ended(end).message
        assert "user_code()" in traceback
        assert 'raise ValueError("no such column")' in traceback
        assert "run_job.py" not in traceback
        assert "run_job.py" in log.read_text()

    def test_a_log_that_cannot_be_made_is_a_failure_of_the_job(self, tmp_path: Path) -> None:
        with local(tmp_path, scripts.returns) as backend:
            run(backend, "a")
            (tmp_path / "logs" / "b.log").mkdir()
            (end,) = run(backend, "b")
        assert ended(end).outcome is Outcome.RAISED
        assert "IsADirectoryError" in ended(end).message

    def test_a_worker_has_a_main_module_of_its_own(self, tmp_path: Path) -> None:
        with local(tmp_path, scripts.looks_around) as backend:
            assert metrics(run(backend, "job")[0]) == {"torch": 0, "main_has_file": 0}
