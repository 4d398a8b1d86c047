"""The NVIDIA GPUs and MIG instances of this machine, and the monitor of their conditions.

All data come from NVML, without a CUDA context.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from shoal.core.device import Cluster, Device
from shoal.host.monitor import Condition, DeviceProcess
from shoal.host.processes import is_descendant, is_visible, program_name

__all__ = [
    "Gpu",
    "Listing",
    "NvmlMonitor",
    "by_device_name",
    "error_reason",
    "gpus",
    "nvml_session",
    "read_gpu",
    "visible_gpus",
]


@dataclass(frozen=True)
class Gpu:
    """A GPU or a MIG instance, as NVML describes it at one moment.

    Args:
        uuid: "GPU-..." or "MIG-...", the same in every process and container; "" if NVML cannot reach the GPU.
        model: "NVIDIA H200", "NVIDIA H200 MIG 1g.18gb"; "unknown" if NVML does not report it.
        memory: Memory for programs, in bytes, without the memory of the driver.
        index: Index in NVML's order, which is that of the PCI bus; an instance has the index of its GPU.
        free: Free memory, in bytes.
        compute_mode: "default", "exclusive process" or "prohibited"; "" if NVML does not report it.
        utilisation: Percent of the last sampling period with a running kernel; None if NVML does not report it.
        uncorrected: Number of uncorrected ECC errors since the start of the driver.
        reason: Reason why no job can use it; "" if jobs can.
    """

    uuid: str
    model: str = "unknown"
    memory: int = 0
    index: int = 0
    free: int = 0
    compute_mode: str = ""
    utilisation: int | None = None
    processes: tuple[DeviceProcess, ...] = ()
    uncorrected: int = 0
    reason: str = ""

    @property
    def is_instance(self) -> bool:
        """Whether it is a MIG instance, with memory and compute of its own."""
        return self.uuid.startswith("MIG-")


@dataclass(frozen=True)
class Listing:
    """The GPUs of a machine."""

    gpus: tuple[Gpu, ...] = ()
    absence_reason: str = ""
    driver_fails: bool = False


def gpus() -> Listing:
    """List all GPUs in NVML's order; the instances of a GPU in place of the GPU if MIG is on."""
    try:
        import pynvml
    except ImportError:
        return Listing(absence_reason="the package nvidia-ml-py is not installed")
    try:
        with nvml_session() as nvml:
            found = [gpu for index in range(nvml.nvmlDeviceGetCount()) for gpu in _gpus_at(nvml, index)]
    except pynvml.NVMLError_LibraryNotFound:
        return Listing(absence_reason="there is no NVIDIA driver (libnvidia-ml.so.1 was not found)")
    except pynvml.NVMLError_DriverNotLoaded:
        return Listing(absence_reason="the NVIDIA driver is not loaded; see nvidia-smi", driver_fails=True)
    except pynvml.NVMLError_NoPermission:
        return Listing(
            absence_reason="this user has no permission for the NVIDIA driver; see ls -l /dev/nvidia*",
            driver_fails=True,
        )
    except pynvml.NVMLError as error:
        return Listing(absence_reason=f"NVML fails: {error}; see nvidia-smi", driver_fails=True)
    return Listing(tuple(found), "" if found else "the NVIDIA driver sees no GPU")


def visible_gpus(present: Listing, setting: str | None) -> Listing:
    """Select the GPUs that `CUDA_VISIBLE_DEVICES` names, in its order.

    As in CUDA, the list ends before the first entry that names no GPU. The index of a GPU with MIG stands for all its
    instances.

    Args:
        present: All GPUs, in the order of the PCI bus. With GPUs of different models CUDA counts in that order only
            under `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
        setting: Value of the variable: indices or beginnings of UUIDs, also of instances, separated by commas; None
            when unset.
    """
    if setting is None or not present.gpus:
        return present
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdecimal():
            match = [gpu for gpu in present.gpus if gpu.index == int(entry)]
        else:
            match = [gpu for gpu in present.gpus if entry and gpu.uuid.startswith(entry)]
            match = match if len(match) == 1 else []
        if not match:
            break
        chosen.extend(match)
    hidden = f"CUDA_VISIBLE_DEVICES={setting!r} hides all GPUs ({len(present.gpus)} of this machine)"
    return replace(present, gpus=tuple(chosen), absence_reason="" if chosen else hidden)


def by_device_name(present: Sequence[Gpu]) -> dict[str, Gpu]:
    """Return the GPUs by the names of their devices: "cuda:0" ... for whole GPUs, "mig:0" ... for instances."""
    whole = [gpu for gpu in present if not gpu.is_instance]
    parts = [gpu for gpu in present if gpu.is_instance]
    return {
        f"{sort}:{index}": gpu for sort, each in (("cuda", whole), ("mig", parts)) for index, gpu in enumerate(each)
    }


@contextmanager
def nvml_session() -> Iterator[Any]:
    """Initialise NVML, yield the module `pynvml`, and shut NVML down."""
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def read_gpu(nvml: Any, handle: Any) -> Gpu:
    """Read a GPU or an instance; after an error of NVML, return the data read before it, and the reason."""
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
            processes=_device_processes(nvml, handle),
            uncorrected=_uncorrected(nvml, handle),
        )
        return replace(gpu, reason=_unusable_reason(nvml, handle, gpu))
    except nvml.NVMLError as error:
        return replace(gpu, reason=error_reason(nvml, error))


def error_reason(nvml: Any, error: Exception) -> str:
    """Return an error of NVML about a GPU as a reason."""
    match error:
        case nvml.NVMLError_GpuIsLost():
            return "has fallen off the bus"
        case nvml.NVMLError_ResetRequired():
            return "needs a reset"
        case nvml.NVMLError_NoPermission():
            return "cannot be read by this user (no permission for NVML)"
    return f"cannot be read by NVML: {error}"


def _gpus_at(nvml: Any, index: int) -> list[Gpu]:
    """Read the GPU with an index in NVML's order, or its instances."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        instances = _instances(nvml, handle)
    except nvml.NVMLError as error:
        return [Gpu("", index=index, reason=error_reason(nvml, error))]
    return [read_gpu(nvml, each) for each in instances or [handle]]


def _instances(nvml: Any, handle: Any) -> list[Any] | None:
    """Return the handles of a GPU's instances; None if MIG is off."""
    try:
        now, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError_NotSupported:  # most GPUs
        return None
    if now != nvml.NVML_DEVICE_MIG_ENABLE:
        return None
    found = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(nvml.NVMLError_NotFound):  # no instance has this index
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))
    return found


def _query(nvml: Any, function: str, *arguments: Any) -> Any:
    """Call a function of NVML; return None if this GPU, instance, driver or user has no result of it."""
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
    """Return the name; that of an instance contains its GPU and its profile, also if the driver leaves out the GPU."""
    model, name = nvml.nvmlDeviceGetName(whole), nvml.nvmlDeviceGetName(handle)
    return name if name.startswith(model) else f"{model} {name}"


def _memory(nvml: Any, handle: Any) -> tuple[int, int]:
    """Return (memory for programs, free memory), in bytes."""
    full = _query(nvml, "nvmlDeviceGetMemoryInfo", handle, nvml.nvmlMemory_v2)
    if full is not None:
        return int(full.total - full.reserved), int(full.free)
    plain = nvml.nvmlDeviceGetMemoryInfo(handle)  # this driver does not report its own memory
    return int(plain.total), int(plain.free)


def _sharing(nvml: Any, handle: Any, whole: Any) -> int:
    """Return the number of compute instances that share the memory of this one's GPU instance."""
    own = nvml.nvmlDeviceGetGpuInstanceId(handle)
    return [nvml.nvmlDeviceGetGpuInstanceId(each) for each in _instances(nvml, whole) or ()].count(own) or 1


def _compute_mode(nvml: Any, handle: Any) -> str:
    names = {
        nvml.NVML_COMPUTEMODE_DEFAULT: "default",
        nvml.NVML_COMPUTEMODE_EXCLUSIVE_PROCESS: "exclusive process",
        nvml.NVML_COMPUTEMODE_PROHIBITED: "prohibited",
    }
    return names.get(_query(nvml, "nvmlDeviceGetComputeMode", handle), "")


def _utilisation(nvml: Any, handle: Any) -> int | None:
    rates = _query(nvml, "nvmlDeviceGetUtilizationRates", handle)
    return None if rates is None else int(rates.gpu)


def _device_processes(nvml: Any, handle: Any) -> tuple[DeviceProcess, ...]:
    """List compute programs, clients of MPS and graphics programs; NVML has a list of each, and some are in two."""
    found: dict[int, int | None] = {}
    for sort in ("Compute", "MPSCompute", "Graphics"):
        for process in _query(nvml, f"nvmlDeviceGet{sort}RunningProcesses_v3", handle) or ():
            known, now = found.get(process.pid), process.usedGpuMemory
            found[process.pid] = known if now is None else max(known or 0, int(now))
    return tuple(DeviceProcess(pid, program_name(pid), memory) for pid, memory in found.items())


def _uncorrected(nvml: Any, handle: Any) -> int:
    kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    return int(_query(nvml, "nvmlDeviceGetTotalEccErrors", handle, *kinds) or 0)


def _unusable_reason(nvml: Any, handle: Any, gpu: Gpu) -> str:
    """Return the reason why no job can use a readable GPU; "" if jobs can."""
    if gpu.compute_mode == "prohibited":
        return "compute mode prohibited"
    *_, beyond_repair = _query(nvml, "nvmlDeviceGetRemappedRows", handle) or (0,)
    if beyond_repair:
        return "ECC errors that cannot be corrected"
    if not gpu.is_instance and (instances := _instances(nvml, handle)) is not None:
        return "MIG is on, and only its instances can be used" if instances else "MIG is on, and no instance was made"
    return ""


_MPS_SERVER = "nvidia-cuda-mps-server"
"""Name of the MPS server, which is not a foreign program: it uses little memory, and NVML lists its clients."""

_UNNAMED = 2**30
"""Bytes that may be in use without a named program, by contexts and the driver."""


@dataclass
class _Baseline:
    """The state of a GPU before the first job of the study on it."""

    pids: frozenset[int]
    unnamed: int
    uncorrected: int


class NvmlMonitor:
    """Monitors a cluster of this machine; the conditions of CPU slots and devices that NVML cannot read do not change.

    In a container NVML may list the host's process ids, or none. So a process that is not visible counts as foreign
    only if it was on the GPU before the study's jobs; a later one may be the study's own.

    Args:
        cluster: Cluster of the monitored devices; no job of the study runs there yet.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._devices: tuple[Device, ...] = ()
        self._baselines: dict[str, _Baseline] = {}
        self._last: dict[str, Condition] = {}
        self.watch(cluster)

    def watch(self, cluster: Cluster) -> None:
        """Monitor these devices from now on."""
        self._devices = tuple(device for _, device in cluster)
        if new := [device for device in self._watched() if device.uuid not in self._baselines]:
            self._last |= self._read_conditions(new, ())

    def conditions(self, own: Collection[int]) -> Mapping[str, Condition]:
        """Return the condition of every device by name; see `Monitor`."""
        seen = {each.name: Condition(each.healthy, each.note) for each in self._devices}
        if watched := self._watched():
            seen |= self._read_conditions(watched, own)
        self._last = seen
        return seen

    def _watched(self) -> list[Device]:
        """Return the devices that NVML could read at the start; the others stay unusable."""
        return [device for device in self._devices if device.uuid and device.memory]

    def _read_conditions(self, devices: Collection[Device], own: Collection[int]) -> Mapping[str, Condition]:
        import pynvml

        try:
            with nvml_session() as nvml:
                return {device.name: self._condition(device, _gpu(nvml, device), own) for device in devices}
        except (pynvml.NVMLError_DriverNotLoaded, pynvml.NVMLError_LibraryNotFound):
            return {device.name: Condition(False, "the NVIDIA driver is gone") for device in devices}
        except pynvml.NVMLError:  # the driver may be updated: keep the last conditions
            return {each.name: self._last.get(each.name, Condition(each.healthy, each.note)) for each in devices}

    def _condition(self, device: Device, gpu: Gpu, own: Collection[int]) -> Condition:
        if gpu.reason:
            return Condition(False, gpu.reason)
        unnamed = max(0, gpu.memory - gpu.free - sum(process.memory or 0 for process in gpu.processes))
        baseline = self._baselines.setdefault(
            device.uuid, _Baseline(frozenset(process.pid for process in gpu.processes), unnamed, gpu.uncorrected)
        )
        if gpu.uncorrected > baseline.uncorrected:
            return Condition(False, "ECC errors that cannot be corrected")
        baseline.uncorrected = gpu.uncorrected  # a reset sets the count to 0
        baseline.unnamed = min(baseline.unnamed, unnamed)
        others = [
            process
            for process in gpu.processes
            if process.name != _MPS_SERVER
            and not is_descendant(process.pid, own)
            and (is_visible(process.pid) or process.pid in baseline.pids)
        ]
        if baseline.unnamed > _UNNAMED:
            others.append(DeviceProcess(0, "programs that NVML does not name", baseline.unnamed))
        return Condition(
            processes=tuple(others), utilisation=gpu.utilisation, memory_used=max(0, gpu.memory - gpu.free)
        )


def _gpu(nvml: Any, device: Device) -> Gpu:
    """Read the device by its UUID, as its index may change."""
    try:
        handle = nvml.nvmlDeviceGetHandleByUUID(device.uuid)
    except nvml.NVMLError_NotFound:
        return Gpu(device.uuid, reason="has fallen off the bus" if device.name.startswith("cuda:") else "is gone")
    except nvml.NVMLError as error:
        return Gpu(device.uuid, reason=error_reason(nvml, error))
    return read_gpu(nvml, handle)
