"""An NVIDIA GPU, or an instance of one, as NVML describes it at one moment."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from shoal.cluster.monitor import Holder
from shoal.cluster.processes import program

__all__ = ["Gpu", "binding", "instances", "read_gpu", "trouble"]


@dataclass(frozen=True)
class Gpu:
    """A GPU, or an instance of one that MIG divides.

    Args:
        uuid: "GPU-..." or "MIG-...", the same in every process and container; "" of a GPU that NVML cannot reach.
        model: "NVIDIA H200", "NVIDIA H200 MIG 1g.18gb"; "unknown" where NVML cannot say.
        memory: bytes that programs may hold; what the driver keeps for itself is not among them.
        index: of the GPU in NVML's order, which is that of the PCI bus; an instance has that of its GPU.
        free: bytes that nobody holds.
        compute_mode: "default", "exclusive process" or "prohibited"; "" where NVML does not say.
        utilisation: percent of the last moment in which anything ran on it; None where NVML does not say.
        holders: all programs on it.
        uncorrected: ECC errors that could not be corrected, since the driver was loaded.
        reason: why no job can use it; "" if one can.
    """

    uuid: str
    model: str = "unknown"
    memory: int = 0
    index: int = 0
    free: int = 0
    compute_mode: str = ""
    utilisation: int | None = None
    holders: tuple[Holder, ...] = ()
    uncorrected: int = 0
    reason: str = ""

    @property
    def is_instance(self) -> bool:
        """Whether it is an instance that MIG made, with memory and compute of its own."""
        return self.uuid.startswith("MIG-")


@contextmanager
def binding() -> Iterator[Any]:
    """The module `pynvml` while NVML is at work.

    Raises:
        ImportError: the package is not there.
        pynvml.NVMLError: NVML cannot be begun.
    """
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def instances(nvml: Any, handle: Any) -> list[Any] | None:
    """The handles of a GPU's instances; None if MIG is off.

    Raises:
        pynvml.NVMLError: the GPU cannot be read.
    """
    try:
        now, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError_NotSupported:  # as most GPUs answer
        return None
    if now != nvml.NVML_DEVICE_MIG_ENABLE:
        return None
    found = []
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(nvml.NVMLError_NotFound):  # a place for which no instance was made
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place))
    return found


def read_gpu(nvml: Any, handle: Any) -> Gpu:
    """All that NVML tells of a GPU or an instance; where it fails, what it told before, and the reason.

    Args:
        nvml: the module.
        handle: of the GPU or the instance.
    """
    gpu = Gpu("")
    try:
        gpu = replace(gpu, uuid=nvml.nvmlDeviceGetUUID(handle))
        whole = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle) if gpu.is_instance else handle
        gpu = replace(gpu, index=nvml.nvmlDeviceGetIndex(whole), model=_model(nvml, handle, whole))
        total, free = _memory(nvml, handle)
        sharing = _sharing(nvml, handle, whole) if gpu.is_instance else 1
        gpu = replace(gpu, memory=total // sharing, free=free // sharing)
        gpu = replace(
            gpu,
            compute_mode=_compute_mode(nvml, handle),
            utilisation=_utilisation(nvml, handle),
            holders=_holders(nvml, handle),
            uncorrected=_uncorrected(nvml, handle),
        )
        return replace(gpu, reason=_flaw(nvml, handle, gpu))
    except nvml.NVMLError as error:
        return replace(gpu, reason=trouble(nvml, error))


def trouble(nvml: Any, error: Exception) -> str:
    """An error of NVML's about a GPU in the words of a reason."""
    match error:
        case nvml.NVMLError_GpuIsLost():
            return "has fallen off the bus"
        case nvml.NVMLError_ResetRequired():
            return "needs a reset"
        case nvml.NVMLError_NoPermission():
            return "may not be looked at by this user (no permission for NVML)"
    return f"cannot be read by NVML: {error}"


def _told(nvml: Any, function: str, *arguments: Any) -> Any:
    """What NVML answers; None where this GPU, instance, driver or user has no such answer."""
    try:
        return getattr(nvml, function)(*arguments)
    except (
        nvml.NVMLError_NotSupported,
        nvml.NVMLError_NoPermission,
        nvml.NVMLError_FunctionNotFound,
        nvml.NVMLError_InvalidArgument,
    ):
        return None


def _model(nvml: Any, handle: Any, whole: Any) -> str:
    """An instance's name holds that of its GPU and its profile, whether or not the driver writes both."""
    model, name = nvml.nvmlDeviceGetName(whole), nvml.nvmlDeviceGetName(handle)
    return name if name.startswith(model) else f"{model} {name}"


def _memory(nvml: Any, handle: Any) -> tuple[int, int]:
    """(bytes that programs may hold, bytes that nobody holds)."""
    full = _told(nvml, "nvmlDeviceGetMemoryInfo", handle, nvml.nvmlMemory_v2)
    if full is not None:
        return int(full.total - full.reserved), int(full.free)
    plain = nvml.nvmlDeviceGetMemoryInfo(handle)  # of a driver that does not tell what it keeps for itself
    return int(plain.total), int(plain.free)


def _sharing(nvml: Any, handle: Any, whole: Any) -> int:
    """How many compute instances share the memory of this one's GPU instance."""
    own = nvml.nvmlDeviceGetGpuInstanceId(handle)
    return [nvml.nvmlDeviceGetGpuInstanceId(each) for each in instances(nvml, whole) or ()].count(own) or 1


def _compute_mode(nvml: Any, handle: Any) -> str:
    names = {
        nvml.NVML_COMPUTEMODE_DEFAULT: "default",
        nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive process",
        nvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
    }
    return names.get(_told(nvml, "nvmlDeviceGetComputeMode", handle), "")


def _utilisation(nvml: Any, handle: Any) -> int | None:
    rates = _told(nvml, "nvmlDeviceGetUtilizationRates", handle)
    return None if rates is None else int(rates.gpu)


def _holders(nvml: Any, handle: Any) -> tuple[Holder, ...]:
    """Programs that compute, clients of MPS and those that draw: NVML lists each sort apart, some in two lists."""
    found: dict[int, int | None] = {}
    for sort in ("Compute", "MPSCompute", "Graphics"):
        for process in _told(nvml, f"nvmlDeviceGet{sort}RunningProcesses_v3", handle) or ():
            before, now = found.get(process.pid), process.usedGpuMemory
            found[process.pid] = before if now is None else max(before or 0, int(now))
    return tuple(Holder(pid, program(pid), memory) for pid, memory in found.items())


def _uncorrected(nvml: Any, handle: Any) -> int:
    kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    return int(_told(nvml, "nvmlDeviceGetTotalEccErrors", handle, *kinds) or 0)


def _flaw(nvml: Any, handle: Any, gpu: Gpu) -> str:
    """Why no job can use a GPU that can be read."""
    if gpu.compute_mode == "prohibited":
        return "compute mode prohibited"
    *_, beyond_repair = _told(nvml, "nvmlDeviceGetRemappedRows", handle) or (0,)
    if beyond_repair:
        return "ECC errors that cannot be corrected"
    if not gpu.is_instance and (made := instances(nvml, handle)) is not None:
        return "MIG is on, and only its instances can be used" if made else "MIG is on, and no instance was made"
    return ""
