"""A study to which everything happens that can, at moments and places drawn by chance, ends as if nothing had.

`task`, `function` and `command`: on this machine, the engine, the server that forks workers, a worker or the function's
or command's own process is killed.

`GPUs`: eight of two kinds on three nodes, which do not exist: NVML and the control program of MPS are fakes, and jobs
train on the CPU. All else is real. Workers are killed or stopped, arrays run out of memory, devices are lost and come
back, MPS servers die.

`ray`: three nodes of a Ray cluster, all on this machine, with a CPU slot each. Workers, agents and nodes are killed
(another node of that name comes at once), and the engine is frozen for longer than the lease of the agents.

The trials (config, state, epochs, every metric at every epoch) equal those of an undisturbed run, which is a local one
for `ray`; every epoch is there, and no process is left that has a file of the study open.
"""

import random
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import invented_machine as machine
import pytest
from chaos_engine import CHECKPOINT_SECONDS, UNDISTURBED
from chaos_faults import Faults, GpuFaults, NodeFaults
from chaos_run import Run, left_behind, standings
from chaos_task import SHORTAGE
from plain import check_equal, curves
from support.audit import overcommitments

from shoal.core.device import Cluster
from shoal.journal.view import JournalView

PROCESSES = ("engine_killed", "worker_killed", "server_killed")
KINDS = {
    "task": (*PROCESSES, *PROCESSES),
    "function": (*PROCESSES, "program_killed") * 2,
    "command": (*PROCESSES, "program_killed") * 2,
    "GPUs": ("worker_killed", "worker_hangs", "memory_runs_out", "device_lost", "mps_dies", "engine_killed"),
    "ray": ("worker_killed", "agent_killed", "node_killed", "engine_frozen", "engine_killed"),
}
"""What happens where, each once."""
TRIALS = {"GPUs": 40, "ray": 40}
PATIENCE_SECONDS = 600.0
"""For one study."""
LEFT_SECONDS = 20.0
"""For processes to end after a study."""
STUDIES_IN_VAIN = 5
"""With so many in a row in which none of the faults that are left finds anything to strike, none will."""
LAST = 0.85
"""Part of a study after which no fault is due; what is left of it may be too short."""
SLACK_SECONDS = 2.0
"""A step, an epoch's end and the writing of a checkpoint, on a machine that is busy with other things."""
TIGHT = 0.75
"""With this part of the memory and cores too much would have been reserved; else the devices were never full."""


@contextmanager
def faults_of(place: str, draw: random.Random) -> Iterator[Faults]:
    """What does faults to the studies of a place, while its devices or nodes are there."""
    if place == "GPUs":
        machine.make()
        yield GpuFaults(draw)
    elif place == "ray":
        from ray_clusters import clustered

        with clustered("ash", "beech", "cedar") as cluster, pytest.MonkeyPatch.context() as patch:
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield NodeFaults(draw, cluster)
    else:
        yield Faults(draw)


def disturb(run: Run, left: list[str], epochs: int, faults: Faults, draw: random.Random, place: str) -> list[str]:
    """See a study to its end with as many of these faults as come to pass.

    Args:
        run: that has begun.
        left: faults, in order.
        epochs: that the study reports in all; faults are due when it has reported so many.
        faults: does them.
        draw: decides when.
        place: of the study.

    Returns:
        The faults that did not come to pass.
    """
    due = sorted(draw.uniform(-0.2 * epochs, LAST * epochs) for _ in left)
    left = left.copy()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not run.ended():
        faults.turn()
        time.sleep(draw.uniform(0.0, 0.1))
        assert time.monotonic() < deadline, f"the study goes on for more than {PATIENCE_SECONDS} s:\n{run.waiting()}"
        if not left or run.reports() < due[-len(left)]:
            continue
        unsaved = run.unsaved_seconds()
        if getattr(faults, left[0])(run):
            assert unsaved < CHECKPOINT_SECONDS + SLACK_SECONDS or place != "task"
            if left.pop(0) == "engine_killed":
                run.process.wait()
                run.begin()
        else:  # another first
            left.append(left.pop(0))
    return left


def reserved_too_much(directory: Path, part: float = 1.0) -> list[str]:
    """All moments at which it had been too much, had there been this part of what there is."""
    nodes = (
        replace(
            node,
            cores=part * node.cores,
            devices=tuple(replace(device, memory=int(part * device.memory)) for device in node.devices),
        )
        for node in machine.CLUSTER.nodes
    )
    with JournalView.read(directory) as journal:
        return list(map(str, overcommitments(journal, Cluster(tuple(nodes)))))


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with a short path, for the sockets in it, which has all that the studies share."""
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as name:
        monkeypatch.setenv("SHOAL_CACHE", f"{name}/cache")
        monkeypatch.setenv(SHORTAGE, f"{name}/shortage")
        monkeypatch.setenv(machine.PLACE, name)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        yield Path(name)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
@pytest.mark.parametrize("place", KINDS)
def test_a_study_to_which_everything_happens_ends_as_if_nothing_had(place: str, folder: Path) -> None:
    draw, trials, left = random.Random(0), TRIALS.get(place, 9), list(KINDS[place])
    draw.shuffle(left)
    directories: list[Path] = []
    in_vain = 0
    with faults_of(place, draw) as faults:
        alone = Run(folder / UNDISTURBED, place, trials)
        while not alone.ended():
            time.sleep(0.05)
        while left and in_vain < STUDIES_IN_VAIN:
            directories.append(folder / f"study-{len(directories) + 1}")
            before, epochs = len(left), alone.reports()
            left = disturb(Run(directories[-1], place, trials), left, epochs, faults, draw, place)
            in_vain = in_vain + 1 if len(left) == before else 0
            assert left_behind(folder, LEFT_SECONDS) == []
    assert not left, "there was nothing for these to strike"
    for directory in directories:
        found = curves(directory)
        check_equal(found, curves(folder / UNDISTURBED))
        assert standings(directory) == standings(folder / UNDISTURBED)
        assert all(found[number].keys() == set(range(1, epoch + 1)) for number, *_, epoch, _ in standings(directory))
    if place == "GPUs":
        assert [reserved_too_much(directory) for directory in directories] == [[]] * len(directories)
        assert any(reserved_too_much(directory, TIGHT) for directory in directories)
