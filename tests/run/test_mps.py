"""The daemon of a GPU, against a fake of NVIDIA's control program with processes and sockets of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import mps_fakes as fakes
import psutil
import pytest
from processes import gone

from shoal.core.device import Device
from shoal.core.errors import MpsError
from shoal.run.gpu_sharing import pinned_limit
from shoal.run.mps import COMMAND, MpsDaemon, default_directory

UUID = "GPU-5d5ba0d6-d33d-2b2c-524d-9e3d8d2b8a77"
GIB = 2**30


@pytest.fixture
def command(place: Path) -> str:
    return str(place / COMMAND)


def daemon(place: Path, command: str, patience: float = 10.0) -> MpsDaemon:
    return MpsDaemon(UUID, place / "gpu", command=command, patience=patience)


def pid_of(each: MpsDaemon) -> int:
    return int((each.directory.pipe / "nvidia-cuda-mps-control.pid").read_text())


def as_a_killed_engine_leaves_it(each: MpsDaemon) -> None:
    each._finalizer.detach()
    each.directory.release_lock()


def test_its_life(place: Path, command: str) -> None:
    mine = daemon(place, command)
    assert not mine.alive()
    mine.start()
    try:
        assert mine.alive()
        assert mine.servers() == []
        assert fakes.connect(os.getpid(), str(mine.directory.pipe))
        (server,) = mine.servers()
        assert mine.clients() == {server: frozenset({os.getpid()})}
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
            assert fakes.connect(other.pid, str(mine.directory.pipe))
            assert mine.clients() == {server: frozenset({os.getpid(), other.pid})}
            other.communicate(b"\n")
        assert mine.clients() == {server: frozenset({os.getpid()})}
        process = pid_of(mine)
    finally:
        mine._control._patience = 2.0  # it waits for its last client, this process
        mine.stop()
    assert gone(process)
    assert gone(server)
    assert not mine.alive()
    mine.stop()
    with pytest.raises(MpsError, match=r"failed at 'get_server_list': exit status 1, 'Cannot find MPS control"):
        mine.servers()


def test_the_last_to_leave_ends_what_killed_engines_have_left_of_other_gpus(place: Path, command: str) -> None:
    mine, used, left = (MpsDaemon(f"GPU-{name}", place / name, command=command) for name in ("mine", "used", "left"))
    for each in (mine, used, left):
        each.start()
    abandoned = pid_of(left)
    as_a_killed_engine_leaves_it(left)
    mine.stop()
    try:
        assert gone(abandoned)
        assert used.alive()
        left.start()
        assert left.alive(), "it can be begun again"
    finally:
        left.stop()
        used.stop()
    assert not left.alive()
    assert not used.alive()


def test_it_hands_on_its_gpu_and_its_directories_but_no_limits(
    place: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setenv("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=1G,7=1G")
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "5")
    mine = daemon(place, command)
    mine.start()
    mine.stop()
    variables = json.loads(mine.log.read_text())
    assert {name: variables.get(name) for name in fakes.VARIABLES} == {
        "CUDA_VISIBLE_DEVICES": UUID,
        "CUDA_MPS_PIPE_DIRECTORY": str(place / "gpu" / "pipe"),
        "CUDA_MPS_LOG_DIRECTORY": str(place / "gpu" / "log"),
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": None,
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT": None,
    }


@pytest.mark.parametrize(
    ("share", "memory", "percentage", "limit"),
    [
        pytest.param(0.25, 4 * GIB, "25", "0=4096M", id="a quarter"),
        pytest.param(0.301, 2**20, "31", "0=1M", id="rounded up"),
        pytest.param(0.0, 1, "1", "0=1M", id="nothing"),
        pytest.param(3.0, None, "100", None, id="all"),
    ],
)
def test_the_environment_of_a_client(
    share: float, memory: int | None, percentage: str, limit: str | None, place: Path
) -> None:
    variables = daemon(place, "unused").environment(share, memory)
    assert variables["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == percentage
    assert variables.get("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT") == limit
    assert variables["CUDA_VISIBLE_DEVICES"] == UUID
    assert variables["CUDA_MPS_PIPE_DIRECTORY"] == str(place / "gpu" / "pipe")


@pytest.mark.parametrize(
    ("memory", "limit"),
    [
        pytest.param(5 * GIB, 5.5 * GIB, id="with the context"),
        pytest.param(5 * GIB + 1, 5.75 * GIB, id="in steps"),
        pytest.param(80 * GIB, 80 * GIB, id="never more than there is"),
    ],
)
def test_the_pinned_limit_of_a_program(memory: int, limit: float) -> None:
    assert pinned_limit(memory, Device("cuda:0", "A100", 80 * GIB, uuid=UUID)) == limit


class TestSharedByStudies:
    def test_the_daemon_of_a_killed_engine_is_replaced(self, place: Path, command: str) -> None:
        killed = daemon(place, command)
        killed.start()
        old = pid_of(killed)
        fakes.connect(os.getpid(), str(killed.directory.pipe))
        (server,) = killed.servers()
        as_a_killed_engine_leaves_it(killed)
        mine = daemon(place, command, patience=3.0)
        mine.start()
        try:
            assert gone(old)
            assert gone(server)
            assert pid_of(mine) != old
            assert mine.servers() == []
        finally:
            mine.stop()

    def test_the_last_of_its_users_ends_it(self, place: Path, command: str) -> None:
        first, second = daemon(place, command), daemon(place, command)
        first.start()
        process = pid_of(first)
        second.start()
        assert pid_of(second) == process
        first.start()
        assert pid_of(first) == process, "a study must not take it from another"
        first.stop()
        assert second.alive()
        second.stop()
        assert gone(process)

    def test_one_that_died_is_begun_anew_by_whoever_needs_it_first(self, place: Path, command: str) -> None:
        first, second = daemon(place, command), daemon(place, command)
        first.start()
        second.start()
        psutil.Process(pid_of(first)).kill()
        assert gone(pid_of(first))
        assert not first.alive()
        second.start()
        assert first.alive()
        first.stop()
        second.stop()

    def test_one_that_is_dropped_ends_its_process(self, place: Path, command: str) -> None:
        dropped = daemon(place, command)
        dropped.start()
        process = pid_of(dropped)
        del dropped
        assert gone(process)

    def test_a_fork_of_the_engine_does_not_end_it(self, place: Path, command: str) -> None:
        mine = daemon(place, command)
        mine.start()
        forked = os.fork()
        if forked == 0:
            mine.stop()
            os._exit(0)
        os.waitpid(forked, 0)
        assert mine.alive()
        mine.stop()
        assert not mine.alive()

    def test_a_number_that_is_now_another_program_s_is_not_a_daemon(self, place: Path, command: str) -> None:
        mine = daemon(place, command)
        mine.directory.acquire(0.0)
        (mine.directory.pipe / "nvidia-cuda-mps-control.pid").write_text(str(os.getppid()))
        assert not mine.alive()
        mine.start()
        assert mine.alive()
        mine.stop()


class TestBadInput:
    def test_it_is_not_installed(self, place: Path) -> None:
        with pytest.raises(MpsError, match=r"'no-such-program' is not installed.*sharing='plain'"):
            daemon(place, "no-such-program").start()

    def test_it_may_not_be_run(self, place: Path, command: str) -> None:
        Path(command).chmod(0o644)
        with pytest.raises(MpsError, match=r"may not be run here: .*Permission denied.*ask the administrator"):
            daemon(place, command).start()

    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            pytest.param(
                "forbidden", r"cannot start: exit status 1, 'Permission denied.*ask the administrator", id="forbidden"
            ),
            pytest.param("short-lived", "ended right after its start; its log: ", id="ends at once"),
        ],
    )
    def test_it_does_not_start(
        self, wrong: str, message: str, place: Path, command: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("FAKE_MPS", wrong)
        with pytest.raises(MpsError, match=message) as raised:
            daemon(place, command, patience=1.0).start()
        assert str(place / "gpu" / "log") in str(raised.value)

    def test_it_does_not_answer(self, place: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
        mine = daemon(place, command, patience=1.0)
        mine.start()
        monkeypatch.setenv("FAKE_MPS", "silent")
        mine._control._patience = 0.2
        with pytest.raises(MpsError, match=r"did not answer b'get_server_list.n' within 0.2 s"):
            mine.servers()
        process = pid_of(mine)
        mine.stop()
        assert gone(process), "one that does not heed is killed"

    def test_one_that_does_not_quit_is_killed(self, place: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FAKE_MPS", "stubborn")
        mine = daemon(place, command, patience=3.0)
        mine.start()
        process = pid_of(mine)
        mine.stop()
        assert gone(process)

    def test_an_answer_that_is_none(self, place: Path, command: str) -> None:
        mine = daemon(place, command)
        mine.start()
        with pytest.raises(MpsError, match="answers 'Server 1 not found' to 'get_client_list 1'"):
            mine._control.query_pids("get_client_list 1")
        mine.stop()

    def test_the_pipe_directory_is_taken(self, place: Path, command: str) -> None:
        foreign, mine = daemon(place, command), daemon(place, command)
        foreign.start()
        process = pid_of(foreign)
        as_a_killed_engine_leaves_it(foreign)
        (foreign.directory.pipe / "nvidia-cuda-mps-control.pid").unlink()
        with pytest.raises(
            MpsError, match=r"another MPS daemon has taken the pipe directory .*echo quit \| CUDA_MPS_PIPE"
        ):
            mine.start()
        mine.stop()
        psutil.Process(process).kill()

    def test_its_directory_is_another_user_s(self, place: Path, command: str, monkeypatch: pytest.MonkeyPatch) -> None:
        (place / "gpu").mkdir()
        monkeypatch.setattr(os, "geteuid", lambda: 4711)
        with pytest.raises(
            MpsError, match=rf"{place} belongs to user {os.getuid()}, so the MPS daemon in it cannot be used"
        ):
            daemon(place, command).start()

    def test_its_directory_cannot_be_made(self, place: Path, command: str) -> None:
        (place / "gpu").write_text("a file")
        with pytest.raises(MpsError, match=r"cannot be made: .*File exists.*TMPDIR"):
            daemon(place, command).start()

    def test_its_path_is_too_long_for_a_socket(self, place: Path, command: str) -> None:
        with pytest.raises(MpsError, match=r"MPS takes at most 80; let the variable TMPDIR"):
            MpsDaemon(UUID, place / ("long" * 20), command=command).start()

    @pytest.mark.parametrize("uuid", ["MIG-5d5ba0d6", "0", ""])
    def test_it_is_not_a_whole_gpu(self, uuid: str) -> None:
        assert not Device("mig:0", "NVIDIA H200 MIG 1g.18gb", GIB, uuid=uuid).supports_mps
        with pytest.raises(MpsError, match="whole GPU"):
            MpsDaemon(uuid)


def test_each_gpu_has_a_directory_of_its_own_with_a_short_path() -> None:
    one, other = default_directory(UUID), default_directory(UUID[:-1])
    assert one != other
    assert one.parent == other.parent
    assert one == default_directory(UUID)
    assert len(one.name) == 12
