"""An invented `pynvml`: the real module's constants and errors, and its functions over GPUs that a test describes."""

from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace

import pynvml

GB = 10**9


@dataclass(eq=False)
class Card:
    """A GPU, or with `group` an instance of one; it is its own handle.

    Args:
        compute, mps, graphics: (process id, bytes or None) of the programs on it.
        mig: whether MIG is on; None on GPUs that have none.
        parts: its instances by place; None where none was made.
        group: the GPU instance that a compute instance belongs to.
        failing: errors by the name of the function that raises them; "" stands for all functions.
    """

    uuid: str
    name: str = "NVIDIA H200"
    total: int = 141 * GB
    reserved: int = 1 * GB
    held: int = 0
    mode: int = pynvml.NVML_COMPUTEMODE_DEFAULT
    busy: int = 0
    compute: list = field(default_factory=list)
    mps: list = field(default_factory=list)
    graphics: list = field(default_factory=list)
    uncorrected: int = 0
    beyond_repair: bool = False
    mig: bool | None = None
    parts: list = field(default_factory=list)
    group: int | None = None
    failing: dict = field(default_factory=dict)


class FakeNvml(ModuleType):
    """Stands for the module. `begun` counts calls of nvmlInit without one of nvmlShutdown.

    Args:
        cards: of the machine; a test may change them and the list.
    """

    def __init__(self, *cards):
        super().__init__("pynvml")
        for name in dir(pynvml):
            if name.startswith(("NVML", "nvmlMemory_v")):
                setattr(self, name, getattr(pynvml, name))
        self.cards = list(cards)
        self.begun = 0
        self.init_error = None
        self.memory_tells_reserve = True

    def nvmlInit(self):  # noqa: N802
        if self.init_error:
            raise self.init_error()
        self.begun += 1

    def nvmlShutdown(self):  # noqa: N802
        self.begun -= 1

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return self._answering("nvmlDeviceGetHandleByIndex", self.cards[index])

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        parts = [part for card in self.cards for part in card.parts if part]
        for card in [*self.cards, *parts]:
            if card.uuid == uuid:
                return self._answering("nvmlDeviceGetHandleByUUID", card)
        raise self.NVMLError_NotFound()

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return self._answering("nvmlDeviceGetUUID", handle).uuid

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return self._answering("nvmlDeviceGetName", handle).name

    def nvmlDeviceGetIndex(self, handle):  # noqa: N802
        return self.cards.index(self._answering("nvmlDeviceGetIndex", handle))

    def nvmlDeviceGetMemoryInfo(self, handle, version=None):  # noqa: N802
        self._answering("nvmlDeviceGetMemoryInfo", handle)
        free = handle.total - handle.reserved - handle.held
        if version is None:
            return SimpleNamespace(total=handle.total, free=free, used=handle.total - free)
        if not self.memory_tells_reserve:
            raise self.NVMLError_FunctionNotFound()
        return SimpleNamespace(total=handle.total, reserved=handle.reserved, free=free, used=handle.held)

    def nvmlDeviceGetComputeMode(self, handle):  # noqa: N802
        return self._answering("nvmlDeviceGetComputeMode", handle).mode

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
        self._answering("nvmlDeviceGetUtilizationRates", handle)
        if handle.mig or handle.group is not None:
            raise self.NVMLError_NotSupported()
        return SimpleNamespace(gpu=handle.busy, memory=0)

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle):  # noqa: N802
        return _processes(self._answering("nvmlDeviceGetComputeRunningProcesses_v3", handle).compute)

    def nvmlDeviceGetMPSComputeRunningProcesses_v3(self, handle):  # noqa: N802
        return _processes(self._answering("nvmlDeviceGetMPSComputeRunningProcesses_v3", handle).mps)

    def nvmlDeviceGetGraphicsRunningProcesses_v3(self, handle):  # noqa: N802
        return _processes(self._answering("nvmlDeviceGetGraphicsRunningProcesses_v3", handle).graphics)

    def nvmlDeviceGetTotalEccErrors(self, handle, errorType, counterType):  # noqa: N802, N803
        self._answering("nvmlDeviceGetTotalEccErrors", handle)
        assert (errorType, counterType) == (self.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, self.NVML_VOLATILE_ECC)
        if handle.group is not None:
            raise self.NVMLError_NotSupported()
        return handle.uncorrected

    def nvmlDeviceGetRemappedRows(self, device):  # noqa: N802
        self._answering("nvmlDeviceGetRemappedRows", device)
        if device.group is not None:
            raise self.NVMLError_NotSupported()
        return (0, 0, 0, int(device.beyond_repair))

    def nvmlDeviceGetMigMode(self, device):  # noqa: N802
        if self._answering("nvmlDeviceGetMigMode", device).mig is None:
            raise self.NVMLError_NotSupported()
        return [int(device.mig), int(device.mig)]

    def nvmlDeviceGetMaxMigDeviceCount(self, device):  # noqa: N802
        return len(self._answering("nvmlDeviceGetMaxMigDeviceCount", device).parts)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device, index):  # noqa: N802
        part = self._answering("nvmlDeviceGetMigDeviceHandleByIndex", device).parts[index]
        if part is None:
            raise self.NVMLError_NotFound()
        return part

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, migDevice):  # noqa: N802, N803
        for card in self.cards:
            if migDevice in card.parts:
                return card
        raise self.NVMLError_InvalidArgument()

    def nvmlDeviceGetGpuInstanceId(self, device):  # noqa: N802
        return self._answering("nvmlDeviceGetGpuInstanceId", device).group

    def _answering(self, function, card):
        if not self.begun:
            raise self.NVMLError_Uninitialized()
        if error := card.failing.get(function) or card.failing.get(""):
            raise error()
        return card


def _processes(listed):
    return [SimpleNamespace(pid=pid, usedGpuMemory=memory) for pid, memory in listed]


def instance(uuid, group=1, profile="1g.18gb", **settings):
    """An instance of an H200."""
    given = {"name": f"NVIDIA H200 MIG {profile}", "total": 18 * GB, "reserved": 0} | settings
    return Card(uuid, group=group, **given)


def divided(*parts, **settings):
    """An H200 with MIG on."""
    return Card("GPU-divided", mig=True, parts=list(parts), **settings)
