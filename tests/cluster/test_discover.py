from dataclasses import dataclass, field

import pytest

from shoal.cluster import ThisMachine, discover
from shoal.cluster.machine import control_group_limits
from shoal.cluster.nvml import Gpu, visible
from shoal.errors import DeviceError

GB = 10**9
H200 = Gpu("GPU-aa11", "NVIDIA H200", 140 * GB)
A100 = Gpu("GPU-bb22", "NVIDIA A100", 80 * GB)
OTHER = Gpu("GPU-bb33", "NVIDIA A100", 80 * GB)


@dataclass
class Invented:
    """A machine that has what the test says."""

    cpu: int = 8
    bytes: int = 32 * GB
    cards: list[Gpu] = field(default_factory=list)
    name: str = "invented"

    def cores(self):
        return self.cpu

    def memory(self):
        return self.bytes

    def gpus(self):
        return self.cards


def summary(cluster):
    return [(device.name, device.kind, device.memory // GB, device.cores) for _, device in cluster]


CPU_SLOTS = [
    pytest.param("auto", 2, [("cpu:0", "cpu/1", 16, 1), ("cpu:1", "cpu/1", 16, 1)], id="auto: a slot per core"),
    pytest.param("auto", 1, [("cpu:0", "cpu/1", 32, 1)], id="auto: one core"),
    pytest.param("cpu", 2, [("cpu:0", "cpu/1", 16, 1), ("cpu:1", "cpu/1", 16, 1)], id="cpu: a slot per core"),
    pytest.param("cpu:1", 8, [("cpu:0", "cpu/8", 32, 8)], id="one slot has all cores"),
    pytest.param("cpu:2", 8, [("cpu:0", "cpu/4", 16, 4), ("cpu:1", "cpu/4", 16, 4)], id="cores are divided"),
    pytest.param("cpu:2", 5, [("cpu:0", "cpu/2", 16, 2), ("cpu:1", "cpu/2", 16, 2)], id="evenly, so of one kind"),
    pytest.param("cpu:2", 1, [("cpu:0", "cpu/1", 16, 1), ("cpu:1", "cpu/1", 16, 1)], id="more slots than cores"),
    pytest.param(["cpu:1"], 2, [("cpu:0", "cpu/2", 32, 2)], id="as a list"),
]


@pytest.mark.parametrize(("devices", "cores", "expected"), CPU_SLOTS)
def test_cpu_slots(devices, cores, expected):
    cluster = discover(devices, Invented(cpu=cores))
    assert summary(cluster) == expected
    assert sum(device.cores for _, device in cluster) <= cluster.nodes[0].cores


FIRST = ("cuda:0", "NVIDIA H200", 140, 4)
SECOND = ("cuda:1", "NVIDIA A100", 80, 4)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        pytest.param("auto", [FIRST, SECOND], id="auto"),
        pytest.param("cuda", [FIRST, SECOND], id="all"),
        pytest.param(["cuda:0", "cuda:1"], [FIRST, SECOND], id="a list"),
        pytest.param(["cuda:1", "cuda:0"], [SECOND, FIRST], id="in the order of the list"),
        pytest.param("cuda:1", [("cuda:1", "NVIDIA A100", 80, 8)], id="one of them, with all cores"),
    ],
)
def test_gpus(devices, expected):
    assert summary(discover(devices, Invented(cards=[H200, A100]))) == expected


def test_cpu_slots_do_not_look_for_gpus():
    machine = Invented()
    machine.gpus = lambda: pytest.fail("NVML was asked")
    assert len(discover("cpu:2", machine).nodes[0].devices) == 2


@pytest.mark.parametrize(
    ("devices", "cards", "message"),
    [
        pytest.param("cuda", [], r"'cuda' is not there; this machine has cpu \(8 cores\)", id="no GPU"),
        pytest.param("cuda:1", [H200], r"'cuda:1' .* has cuda:0 \(NVIDIA H200\), cpu \(8 cores\)", id="not that many"),
        pytest.param(["cuda:0", "cuda:0"], [H200], "twice", id="twice"),
        pytest.param(["cuda:0", "cpu:1"], [H200], "'cpu:1' is not understood", id="mixed"),
        pytest.param("gpu", [H200], "'gpu' is not understood; .*'cuda:i'", id="unknown word"),
        pytest.param("cpu:0", [], "at least 1, got 'cpu:0'", id="no slots"),
        pytest.param("cpu:-1", [], "got 'cpu:-1'", id="fewer than none"),
        pytest.param("cpu:two", [], "got 'cpu:two'", id="slots in words"),
        pytest.param([], [], "is empty", id="nothing"),
        pytest.param("", [], "'' is not understood", id="empty name"),
    ],
)
def test_what_does_not_exist_is_refused(devices, cards, message):
    with pytest.raises(DeviceError, match=message):
        discover(devices, Invented(cards=cards))


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        pytest.param(None, [H200, A100, OTHER], id="unset"),
        pytest.param("", [], id="empty"),
        pytest.param("-1", [], id="none"),
        pytest.param("2,0", [OTHER, H200], id="indices, in order"),
        pytest.param("GPU-aa, 1", [H200, A100], id="the beginning of a UUID"),
        pytest.param("GPU-bb", [], id="an ambiguous beginning"),
        pytest.param("0,7,1", [H200], id="ends at the first that is not there"),
    ],
)
def test_cuda_visible_devices(setting, expected):
    assert visible([H200, A100, OTHER], setting) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param({}, (None, None), id="no control group"),
        pytest.param({"cpu.max": "max 100000\n", "memory.max": "max\n"}, (None, None), id="no limits"),
        pytest.param({"cpu.max": "250000 100000\n", "memory.max": "4096\n"}, (2.5, 4096), id="limits"),
    ],
)
def test_control_group_limits(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert control_group_limits(tmp_path) == expected


def test_this_machine_stays_within_its_control_group(tmp_path):
    (tmp_path / "cpu.max").write_text("50000 100000")
    (tmp_path / "memory.max").write_text("4096")
    machine = ThisMachine(control_group=tmp_path)
    assert (machine.cores(), machine.memory()) == (1, 4096)


def test_this_machine_has_a_name_cores_and_memory(tmp_path):
    machine = ThisMachine(control_group=tmp_path)
    assert machine.name
    assert machine.cores() >= 1
    assert machine.memory() > 2**20


def test_devices_of_this_machine_without_visible_gpus_are_cpu_slots(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert all(device.kind == "cpu/1" for _, device in discover("auto"))
