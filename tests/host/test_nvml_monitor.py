import os
import subprocess
import sys
from pathlib import Path

import psutil
import pynvml
import pytest
from nvml_samples import GB, Card, divided, instance

from shoal.core.command import Step
from shoal.core.rows import Telemetry
from shoal.host.discover import discover
from shoal.host.fleet import Fleet
from shoal.host.monitor import Condition, DeviceProcess
from shoal.host.nvml import NvmlMonitor
from shoal.study.devices import DeviceConditions, DeviceTracker

ENGINE = os.getpid()
PARENT = os.getppid()
PARENT_NAME = psutil.Process(PARENT).name()
HIDDEN, HIDDEN_TOO = 2**22 + 1, 2**22 + 2
"""Above the largest process id that Linux gives: as a container sees processes of its host."""


@pytest.fixture
def card(nvml):
    nvml.cards = [Card("GPU-a"), Card("GPU-b")]
    return nvml.cards[0]


@pytest.fixture
def monitor(card):
    return NvmlMonitor(discover("auto"))


def look(monitor, *own):
    """The condition of the first GPU; the others must be healthy and nobody's."""
    first, *others = monitor.conditions(own or (ENGINE,)).values()
    assert all(condition == Condition() for condition in others)
    return first


def test_all_is_well(monitor):
    assert monitor.conditions([ENGINE]) == {"cuda:0": Condition(), "cuda:1": Condition()}


def test_cpu_slots_are_healthy_and_nvml_is_not_asked(nvml):
    nvml.init_error = pynvml.NVMLError_Unknown
    assert NvmlMonitor(discover("cpu:2")).conditions([ENGINE]) == {"cpu:0": Condition(), "cpu:1": Condition()}


def test_the_use_of_a_gpu_is_measured_and_makes_no_other_condition(monitor, card):
    card.held, card.busy = 3 * GB, 71
    condition = look(monitor)
    assert (condition.utilisation, condition.memory_used) == (71, 3 * GB)
    assert condition == Condition(processes=condition.processes)
    measured = [x for x in written(monitor) if isinstance(x, Telemetry)]
    assert measured == [Telemetry(9.0, "cuda:0", 71, 3 * GB), Telemetry(9.0, "cuda:1", 0, 0)]


def written(monitor):
    """What the study writes after a look at its devices."""
    step, cluster = Step(9.0), discover("auto")
    tracker = DeviceTracker(Fleet(cluster), discover, None, Path())
    tracker.apply_conditions(DeviceConditions(monitor.conditions([ENGINE])), step)
    return step.rows


FAILING = [
    pytest.param({"failing": {"": pynvml.NVMLError_GpuIsLost}}, "has fallen off the bus", id="lost"),
    pytest.param({"failing": {"": pynvml.NVMLError_ResetRequired}}, "needs a reset", id="needs a reset"),
    pytest.param({"failing": {"": pynvml.NVMLError_Unknown}}, "cannot be read by NVML: Unknown Error", id="unknown"),
    pytest.param({"mode": pynvml.NVML_COMPUTEMODE_PROHIBITED}, "compute mode prohibited", id="prohibited"),
    pytest.param({"uncorrected": 1}, "ECC errors that cannot be corrected", id="an ECC error"),
    pytest.param({"beyond_repair": True}, "ECC errors that cannot be corrected", id="memory beyond repair"),
    pytest.param({"uuid": "GPU-another"}, "has fallen off the bus", id="no longer listed"),
    pytest.param({"mig": True}, "MIG is on, and no instance was made", id="divided"),
]


@pytest.mark.parametrize(("change", "reason"), FAILING)
def test_a_gpu_that_fails_is_a_condition_and_so_is_its_return(monitor, card, change, reason):
    before = {name: getattr(card, name) for name in change}
    for _ in range(2):
        vars(card).update(change)
        assert look(monitor) == Condition(False, reason)
        vars(card).update(before)
        assert look(monitor) == Condition()


def test_ecc_errors_of_before_do_not_count_but_those_after_a_reset_do(card):
    card.uncorrected = 3
    monitor = NvmlMonitor(discover("auto"))
    for uncorrected, healthy in [(3, True), (4, False), (4, False), (0, True), (1, False)]:
        card.uncorrected = uncorrected
        assert look(monitor).healthy is healthy


@pytest.mark.parametrize(
    ("function", "returns"),
    [
        pytest.param("nvmlDeviceGetComputeMode", True, id="after it told what it is"),
        pytest.param("nvmlDeviceGetMemoryInfo", False, id="before it told its memory"),
        pytest.param("nvmlDeviceGetHandleByIndex", False, id="before it told its UUID"),
    ],
)
def test_a_gpu_that_is_lost_from_the_start_returns_if_it_is_known(card, function, returns):
    card.failing = {function: pynvml.NVMLError_GpuIsLost}
    monitor = NvmlMonitor(discover("auto"))
    assert look(monitor) == Condition(False, "has fallen off the bus")
    card.failing = {}
    assert look(monitor).healthy is returns


def test_an_instance_that_is_taken_away(nvml):
    nvml.cards = [divided(instance("MIG-1"), instance("MIG-2"))]
    monitor = NvmlMonitor(discover("auto"))
    assert look(monitor) == Condition()
    nvml.cards[0].parts[0] = None
    assert look(monitor) == Condition(False, "is gone")


@pytest.mark.parametrize(
    ("error", "condition"),
    [
        pytest.param(pynvml.NVMLError_DriverNotLoaded, Condition(False, "the NVIDIA driver is gone"), id="no driver"),
        pytest.param(pynvml.NVMLError_LibRmVersionMismatch, Condition(), id="being updated"),
    ],
)
def test_when_nvml_itself_fails(monitor, nvml, error, condition):
    nvml.init_error = error
    assert monitor.conditions([ENGINE]) == {"cuda:0": condition, "cuda:1": condition}
    nvml.init_error = None
    assert look(monitor) == Condition()


def test_programs_of_others_are_holders_and_the_studys_own_are_not(monitor, card):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        card.compute = [(worker.pid, 2 * GB), (PARENT, 70 * GB)]
        card.held = 72 * GB
        others = (DeviceProcess(PARENT, PARENT_NAME, 70 * GB),)
        assert look(monitor, worker.pid, ENGINE) == Condition(processes=others)
        assert look(monitor, ENGINE) == Condition(processes=others), "a child of the engine is its own"
        worker.stdin.close()
    card.compute, card.held = [], 0
    assert look(monitor) == Condition()


def test_processes_that_cannot_be_seen_are_others_if_they_were_there_first(card):
    card.compute, card.held = [(HIDDEN, 70 * GB)], 70 * GB
    monitor = NvmlMonitor(discover("auto"))
    card.compute, card.held = [(HIDDEN, 70 * GB), (HIDDEN_TOO, 2 * GB)], 72 * GB
    assert look(monitor) == Condition(processes=(DeviceProcess(HIDDEN, f"pid {HIDDEN}", 70 * GB),))


def unnamed(memory):
    return DeviceProcess(0, "programs that NVML does not name", memory)


def test_memory_that_nobody_is_named_for_is_that_of_others_as_far_as_it_was_held_before(card):
    card.held = 70 * GB
    monitor = NvmlMonitor(discover("auto"))
    for held, others in [(70, 70), (75, 70), (30, 30), (60, 30), (0, 0), (60, 0)]:
        card.held = held * GB
        assert look(monitor) == Condition(processes=(unnamed(others * GB),) if others else ())


def test_the_little_that_a_driver_takes_is_nobodys(card):
    card.held = GB // 2
    assert look(NvmlMonitor(discover("auto"))) == Condition()


def test_a_process_of_unknown_memory_is_named_beside_what_it_may_hold(card):
    card.compute, card.held = [(HIDDEN, None)], 70 * GB
    processes = (DeviceProcess(HIDDEN, f"pid {HIDDEN}", None), unnamed(70 * GB))
    assert look(NvmlMonitor(discover("auto"))) == Condition(processes=processes)


def test_devices_come_and_go(monitor, nvml, card):
    card.held = 40 * GB
    nvml.cards.append(Card("GPU-c", held=20 * GB))
    monitor.watch(discover(["cuda:0", "cuda:2"]))
    assert monitor.conditions([ENGINE]) == {"cuda:0": Condition(), "cuda:2": Condition(processes=(unnamed(20 * GB),))}
