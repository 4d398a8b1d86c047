import inspect
import os
import re
import sys

import psutil
import pynvml
import pytest
from nvml_samples import GB, Card, FakeNvml, divided, instance

from shoal.host.monitor import DeviceProcess
from shoal.host.nvml import Gpu, Listing, by_device_name, gpus, visible_gpus

LOST = pynvml.NVMLError_GpuIsLost
FORBIDDEN = pynvml.NVMLError_NoPermission
UNSUPPORTED = pynvml.NVMLError_NotSupported
SELF = os.getpid()
SELF_NAME = psutil.Process().name()
NOBODY = 2**22 + 1
"""Above the largest process id that Linux gives."""


def test_the_fake_has_the_functions_and_arguments_of_the_real_module():
    functions = [name for name in dir(FakeNvml) if name.startswith("nvml")]
    assert len(functions) > 15
    for name in functions:
        real = inspect.signature(inspect.unwrap(getattr(pynvml, name)))
        assert list(real.parameters) == list(inspect.signature(getattr(FakeNvml(), name)).parameters), name


def test_gpus_of_two_models_are_listed_with_all_fields(nvml):
    nvml.cards = [
        Card("GPU-a", held=2 * GB, busy=97, compute=[(SELF, 2 * GB)], uncorrected=1),
        Card("GPU-b", "NVIDIA A100", total=80 * GB, mode=pynvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS),
    ]
    assert gpus() == Listing(
        (
            Gpu(
                "GPU-a",
                "NVIDIA H200",
                140 * GB,
                0,
                138 * GB,
                "default",
                97,
                (DeviceProcess(SELF, SELF_NAME, 2 * GB),),
                1,
            ),
            Gpu("GPU-b", "NVIDIA A100", 79 * GB, 1, 79 * GB, "exclusive process", 0),
        )
    )


def test_memory_of_a_driver_that_does_not_report_its_reserve(nvml):
    nvml.cards, nvml.memory_tells_reserve = [Card("GPU-a", held=40 * GB)], False
    (gpu,) = gpus().gpus
    assert (gpu.memory, gpu.free, gpu.reason) == (141 * GB, 100 * GB, "")


ODD = [
    pytest.param(Card("GPU-a", mode=pynvml.NVML_COMPUTEMODE_PROHIBITED), "compute mode prohibited", id="prohibited"),
    pytest.param(Card("GPU-a", beyond_repair=True), "ECC errors that cannot be corrected", id="memory beyond repair"),
    pytest.param(Card("GPU-a", failing={"nvmlDeviceGetName": LOST}), "has fallen off the bus", id="lost"),
    pytest.param(
        Card("GPU-a", failing={"nvmlDeviceGetUtilizationRates": pynvml.NVMLError_ResetRequired}),
        "needs a reset",
        id="needs a reset",
    ),
    pytest.param(
        Card("GPU-a", failing={"nvmlDeviceGetMemoryInfo": UNSUPPORTED}),
        "cannot be read by NVML: Not Supported",
        id="memory that NVML does not know",
    ),
    pytest.param(divided(None, None), "MIG is on, and no instance was made", id="MIG without instances"),
]


@pytest.mark.parametrize(("card", "reason"), ODD)
def test_a_gpu_that_cannot_be_used_is_listed_with_the_reason(nvml, card, reason):
    nvml.cards = [card, Card("GPU-fine")]
    odd, fine = gpus().gpus
    assert (odd.uuid, odd.reason) == (card.uuid, reason)
    assert (fine.uuid, fine.reason, fine.index) == ("GPU-fine", "", 1)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        pytest.param(LOST, "has fallen off the bus", id="lost"),
        pytest.param(FORBIDDEN, "cannot be read by this user (no permission for NVML)", id="forbidden"),
        pytest.param(pynvml.NVMLError_Unknown, "cannot be read by NVML: Unknown Error", id="unknown"),
    ],
)
def test_a_gpu_without_a_handle_keeps_its_place(nvml, error, reason):
    nvml.cards = [Card("GPU-a", failing={"nvmlDeviceGetHandleByIndex": error}), Card("GPU-b")]
    assert gpus().gpus[0] == Gpu("", "unknown", reason=reason)
    assert [*by_device_name(gpus().gpus)] == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize("error", [UNSUPPORTED, FORBIDDEN, pynvml.NVMLError_FunctionNotFound])
def test_missing_values_of_a_gpu_are_none(nvml, error):
    optional = ["ComputeMode", "UtilizationRates", "TotalEccErrors", "RemappedRows"]
    optional += [f"{sort}RunningProcesses_v3" for sort in ("Compute", "MPSCompute", "Graphics")]
    nvml.cards = [Card("GPU-a", compute=[(SELF, GB)], failing={f"nvmlDeviceGet{name}": error for name in optional})]
    assert gpus().gpus == (Gpu("GPU-a", "NVIDIA H200", 140 * GB, free=140 * GB),)


HOLDERS = [
    pytest.param({"compute": [(SELF, GB)]}, [DeviceProcess(SELF, SELF_NAME, GB)], id="named by its program"),
    pytest.param(
        {"compute": [(NOBODY, None)]}, [DeviceProcess(NOBODY, f"pid {NOBODY}", None)], id="of a container's host"
    ),
    pytest.param(
        {"compute": [(NOBODY, GB)], "mps": [(SELF, GB)], "graphics": [(NOBODY, 2 * GB)]},
        [DeviceProcess(NOBODY, f"pid {NOBODY}", 2 * GB), DeviceProcess(SELF, SELF_NAME, GB)],
        id="listed twice, and a client of MPS",
    ),
]


@pytest.mark.parametrize(("lists", "expected"), HOLDERS)
def test_processes_on_a_gpu(nvml, lists, expected):
    nvml.cards = [Card("GPU-a", **lists)]
    assert gpus().gpus[0].processes == tuple(expected)


def test_instances_take_the_place_of_the_gpu_that_mig_divides(nvml):
    parts = [instance("MIG-1", compute=[(SELF, GB)]), None, instance("MIG-2", group=2, name="MIG 1g.18gb")]
    nvml.cards = [Card("GPU-a", mig=False), divided(*parts), Card("GPU-b", "NVIDIA A100")]
    found = by_device_name(gpus().gpus)
    assert [(name, gpu.uuid, gpu.model, gpu.memory // GB, gpu.index) for name, gpu in found.items()] == [
        ("cuda:0", "GPU-a", "NVIDIA H200", 140, 0),
        ("cuda:1", "GPU-b", "NVIDIA A100", 140, 2),
        ("mig:0", "MIG-1", "NVIDIA H200 MIG 1g.18gb", 18, 1),
        ("mig:1", "MIG-2", "NVIDIA H200 MIG 1g.18gb", 18, 1),
    ]
    assert found["mig:0"].processes == (DeviceProcess(SELF, SELF_NAME, GB),)
    assert (found["mig:0"].utilisation, found["mig:0"].reason) == (None, "")


def test_compute_instances_divide_the_memory_of_the_gpu_instance_they_share(nvml):
    shared = [instance(f"MIG-{place}", group=2, profile="1c.2g.35gb", total=36 * GB) for place in range(2)]
    nvml.cards = [divided(*shared, instance("MIG-alone", group=5))]
    assert [(gpu.memory // GB, gpu.free // GB) for gpu in gpus().gpus] == [(18, 18)] * 3


ABSENT = [
    pytest.param(pynvml.NVMLError_LibraryNotFound, r"no NVIDIA driver \(libnvidia-ml.so.1", False, id="no driver"),
    pytest.param(pynvml.NVMLError_DriverNotLoaded, "is not loaded", True, id="driver not loaded"),
    pytest.param(FORBIDDEN, r"no permission .* /dev/nvidia", True, id="no permission"),
    pytest.param(pynvml.NVMLError_LibRmVersionMismatch, "NVML fails: .*mismatch", True, id="half an update"),
    pytest.param(None, "the NVIDIA driver sees no GPU", False, id="no GPU"),
]


@pytest.mark.parametrize(("error", "absence_reason", "driver_fails"), ABSENT)
def test_the_reason_why_there_is_no_gpu(nvml, error, absence_reason, driver_fails):
    nvml.init_error = error
    listing = gpus()
    assert (listing.gpus, listing.driver_fails) == ((), driver_fails)
    assert re.search(absence_reason, listing.absence_reason)


def test_without_the_binding_there_are_none(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus() == Listing(absence_reason="the package nvidia-ml-py is not installed")


H200 = Gpu("GPU-aa11", "NVIDIA H200", 140 * GB, 0)
A100 = Gpu("GPU-bb22", "NVIDIA A100", 80 * GB, 1)
OTHER = Gpu("GPU-bb33", "NVIDIA A100", 80 * GB, 2)
PART = Gpu("MIG-cc44", "NVIDIA H200 MIG 1g.18gb", 18 * GB, 3)
PART_TOO = Gpu("MIG-cc55", "NVIDIA H200 MIG 1g.18gb", 18 * GB, 3)
LOST_ONE = Gpu("", index=4, reason="has fallen off the bus")
ALL = (H200, A100, OTHER, PART, PART_TOO, LOST_ONE)


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        pytest.param(None, ALL, id="unset"),
        pytest.param("", (), id="empty"),
        pytest.param("-1", (), id="none"),
        pytest.param("2,0", (OTHER, H200), id="indices, in order"),
        pytest.param("GPU-aa, 1", (H200, A100), id="the beginning of a UUID"),
        pytest.param("GPU-bb", (), id="an ambiguous beginning"),
        pytest.param("MIG-cc55,0", (PART_TOO, H200), id="an instance"),
        pytest.param("3", (PART, PART_TOO), id="a GPU that MIG divides"),
        pytest.param("4,0", (LOST_ONE, H200), id="one that is lost"),
        pytest.param("0,7,1", (H200,), id="ends at the first that is not there"),
    ],
)
def test_cuda_visible_devices(setting, expected):
    listing = visible_gpus(Listing(ALL), setting)
    assert listing.gpus == expected
    hidden = f"CUDA_VISIBLE_DEVICES={setting!r} hides all GPUs (6 of this machine)"
    assert listing.absence_reason == ("" if expected else hidden)


def test_where_there_are_no_gpus_none_is_hidden():
    absent = Listing(absence_reason="there is no NVIDIA driver")
    assert visible_gpus(absent, "0") == absent
