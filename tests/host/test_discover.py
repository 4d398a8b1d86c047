from dataclasses import dataclass, field

import pytest
from nvml_samples import Card, divided, instance

from shoal.core.device import Device
from shoal.core.errors import DeviceError
from shoal.host.discover import discover, take_inventory
from shoal.host.machine import Accelerator, ThisMachine, control_group_limits
from shoal.host.nvml import Gpu, Listing

GB = 10**9
H200 = Gpu("GPU-aa11", "NVIDIA H200", 140 * GB)
A100 = Gpu("GPU-bb22", "NVIDIA A100", 80 * GB)
PARTS = [Gpu(f"MIG-cc{place}", "NVIDIA H200 MIG 1g.18gb", 18 * GB, 2) for place in range(2)]
PROHIBITED = Gpu("GPU-dd55", "NVIDIA H200", 140 * GB, reason="compute mode prohibited")
LOST = Gpu("", index=1, reason="has fallen off the bus")


@dataclass
class Invented:
    """A machine that has what the test says."""

    cpu: int = 8
    allowed: int = 1000
    bytes: int = 32 * GB
    cards: list[Gpu] = field(default_factory=list)
    others: list[Accelerator] = field(default_factory=list)
    absence_reason: str = "there is no NVIDIA driver"
    driver_fails: bool = False
    name: str = "invented"

    def cores(self):
        return self.cpu

    def threads(self, cores):
        return min(cores, self.allowed)

    def memory(self):
        return self.bytes

    def gpus(self):
        return Listing(tuple(self.cards), "" if self.cards else self.absence_reason, self.driver_fails)

    def accelerators(self, sort):
        return [each for each in self.others if each.name.startswith(sort)]


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


def test_a_slot_whose_jobs_may_have_fewer_threads_than_cores_is_of_another_kind():
    """What was measured with fewer threads says nothing of those with more; the cores stay the slot's."""
    kinds = {allowed: summary(discover("cpu:2", Invented(allowed=allowed))) for allowed in (1, 4)}
    assert kinds[1] == [("cpu:0", "cpu/1", 16, 4), ("cpu:1", "cpu/1", 16, 4)]
    assert kinds[4] == [("cpu:0", "cpu/4", 16, 4), ("cpu:1", "cpu/4", 16, 4)]


@pytest.mark.parametrize(
    ("allowed", "threads"),
    [
        pytest.param(None, 4, id="as many as there are cores"),
        pytest.param("1", 1, id="no more than its user allows"),
        pytest.param("8", 4, id="no more than there are cores"),
    ],
)
def test_this_machine_has_threads_as_its_user_allows(allowed, threads, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS")
    if allowed is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", allowed)
    assert ThisMachine().threads(4) == threads


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


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        pytest.param("auto", ["cuda:0", "cuda:1", "mig:0", "mig:1"], id="auto"),
        pytest.param("cuda", ["cuda:0", "cuda:1"], id="whole GPUs"),
        pytest.param("mig", ["mig:0", "mig:1"], id="all instances"),
        pytest.param("mig:1", ["mig:1"], id="an instance"),
        pytest.param(["mig:1", "cuda:0"], ["mig:1", "cuda:0"], id="both"),
        pytest.param(["mig", "cuda:1"], ["mig:0", "mig:1", "cuda:1"], id="all of one type"),
    ],
)
def test_instances_of_gpus(devices, expected):
    cluster = discover(devices, Invented(cards=[H200, A100, *PARTS]))
    assert [device.name for _, device in cluster] == expected
    assert all(device.kind == "NVIDIA H200 MIG 1g.18gb" for _, device in cluster if device.name.startswith("mig"))


def test_gpus_and_instances_are_bound_by_uuid():
    cluster = discover("auto", Invented(cards=[H200, *PARTS]))
    assert [(device.uuid, device.torch_name) for _, device in cluster] == [
        ("GPU-aa11", "cuda:0"),
        ("MIG-cc0", "cuda:0"),
        ("MIG-cc1", "cuda:0"),
    ]


@pytest.mark.parametrize(
    ("name", "is_cuda", "torch_name"),
    [
        pytest.param("cuda:1", True, "cuda:1", id="a GPU to which no process is bound"),
        pytest.param("cpu:3", False, "cpu", id="a CPU slot"),
        pytest.param("mps:0", False, "mps", id="Apple's"),
        pytest.param("xpu:1", False, "xpu:1", id="Intel's"),
        pytest.param("gpu/7", False, "cpu", id="an invented one"),
    ],
)
def test_what_torch_calls_a_device(name, is_cuda, torch_name):
    device = Device(name, "kind", 1)
    assert (device.is_cuda, device.torch_name) == (is_cuda, torch_name)


APPLE = Accelerator("mps:0", "Apple M2", 20 * GB)
INTEL = [Accelerator(f"xpu:{place}", "Intel Max 1100", 48 * GB) for place in range(2)]


@pytest.mark.parametrize(
    ("devices", "cards", "expected"),
    [
        pytest.param("auto", [], [("mps:0", "Apple M2", 20, 8)], id="auto"),
        pytest.param("auto", [H200], [("cuda:0", "NVIDIA H200", 140, 8)], id="auto prefers GPUs of NVIDIA's"),
        pytest.param("mps", [], [("mps:0", "Apple M2", 20, 8)], id="by type"),
        pytest.param("xpu:1", [], [("xpu:1", "Intel Max 1100", 48, 8)], id="by name"),
        pytest.param("xpu", [], [(f"xpu:{i}", "Intel Max 1100", 48, 4) for i in (0, 1)], id="all of a type"),
    ],
)
def test_accelerators_that_only_torch_knows(devices, cards, expected):
    assert summary(discover(devices, Invented(cards=cards, others=[APPLE, *INTEL]))) == expected


@pytest.mark.parametrize("devices", ["cpu:2", "xpu"])
def test_nvml_is_asked_only_for_what_it_knows(devices):
    machine = Invented(others=INTEL)
    machine.gpus = lambda: pytest.fail("NVML was asked")
    assert len(discover(devices, machine).nodes[0].devices) == 2


def test_what_cannot_be_used_is_an_unhealthy_device_with_the_reason():
    cluster = discover("auto", Invented(cards=[H200, LOST, PROHIBITED]))
    assert [(device.name, device.healthy, device.note) for _, device in cluster] == [
        ("cuda:0", True, ""),
        ("cuda:1", False, "has fallen off the bus"),
        ("cuda:2", False, "compute mode prohibited"),
    ]


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        pytest.param("cuda:1", r"cuda:1 \(NVIDIA H200\): compute mode prohibited; look at .*'cpu'", id="by name"),
        pytest.param("auto", r"cuda:0 \(unknown\): has fallen off the bus, cuda:1 .* prohibited;", id="all of them"),
    ],
)
def test_a_study_needs_one_healthy_device(devices, message):
    machine = Invented(cards=[LOST, PROHIBITED])
    with pytest.raises(DeviceError, match=f"no device can be used: {message}"):
        discover(devices, machine)
    assert take_inventory(devices, machine).gpus["cuda:1"] == PROHIBITED


@pytest.mark.parametrize(
    "driver_fails", [pytest.param(True, id="a driver that fails"), pytest.param(False, id="no driver")]
)
def test_cpu_slots_instead_of_gpus_are_a_warning_only_where_there_should_be_gpus(caplog, driver_fails):
    machine = Invented(absence_reason="NVML fails: Unknown Error", driver_fails=driver_fails)
    assert len(discover("auto", machine).nodes[0].devices) == 8
    assert caplog.messages == ["no GPU is used: NVML fails: Unknown Error"][: int(driver_fails)]


@pytest.mark.parametrize(
    ("devices", "cards", "message"),
    [
        pytest.param(
            "cuda", [], r"'cuda' is not there; .* has cpu \(8 cores\); there is no NVIDIA driver", id="no GPU"
        ),
        pytest.param("mig:0", [H200], r"'mig:0' is not there; .* has cuda:0 \(NVIDIA H200\), cpu", id="no instance"),
        pytest.param("mps", [], r"'mps' is not there; this machine has cpu \(8 cores\)$", id="not Apple's"),
        pytest.param("cuda:1", [H200], r"'cuda:1' .* has cuda:0 \(NVIDIA H200\), cpu \(8 cores\)", id="not that many"),
        pytest.param(["cuda:0", "cuda:0"], [H200], "twice", id="twice"),
        pytest.param(["cuda", "cuda:0"], [H200], "twice: cuda, cuda:0", id="twice, once by its type"),
        pytest.param(["cuda:0", "cpu:1"], [H200], "'cpu:1' is not understood in a list; .*'cpu:2'", id="mixed"),
        pytest.param(["cpu:0", "cpu:1"], [], "'cpu:0' is not understood in a list", id="slots by their names"),
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


def test_devices_of_this_machine_are_what_cuda_visible_devices_leaves_of_nvml(nvml, monkeypatch):
    nvml.cards = [Card("GPU-a"), divided(instance("MIG-1"), instance("MIG-2")), Card("GPU-b")]
    assert [device.name for _, device in discover("auto")] == ["cuda:0", "cuda:1", "mig:0", "mig:1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-2,GPU-b")
    assert [(device.name, device.uuid) for _, device in discover("auto")] == [("cuda:0", "GPU-b"), ("mig:0", "MIG-2")]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert all(device.kind == "cpu/1" for _, device in discover("auto"))


def test_torch_is_not_asked_for_devices_of_apples_elsewhere(monkeypatch):
    monkeypatch.setattr("platform.system", lambda: "Linux")
    monkeypatch.setattr("shoal.host.machine.torch_devices", lambda sort: pytest.fail("torch was asked"))
    assert ThisMachine().accelerators("mps") == ()
