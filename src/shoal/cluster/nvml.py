"""The NVIDIA GPUs and MIG instances of this machine, read through NVML; no CUDA context is made."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from shoal.cluster.monitor import Holder
from shoal.cluster.processes import program

__all__ = ["Gpu", "Listing", "binding", "gpus", "named", "read_gpu", "trouble", "visible"]


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
        holders: All programs on it.
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
    holders: tuple[Holder, ...] = ()
    uncorrected: int = 0
    reason: str = ""

    @property
    def is_instance(self) -> bool:
        """Whether it is a MIG instance, with memory and compute of its own."""
        return self.uuid.startswith("MIG-")


@dataclass(frozen=True)
class Listing:
    """The GPUs of a machine.

    Args:
        gpus: Usable and unusable GPUs, the latter with their reasons.
        absence: Reason why there are none; "" if there are some.
        trouble: Whether a driver is installed and fails.
    """

    gpus: tuple[Gpu, ...] = ()
    absence: str = ""
    trouble: bool = False


def gpus() -> Listing:
    """List all GPUs in NVML's order; the instances of a GPU in place of the GPU if MIG is on."""
    try:
        import pynvml
    except ImportError:
        return Listing(absence="the package nvidia-ml-py is not installed")
    try:
        with binding() as nvml:
            found = [gpu for index in range(nvml.nvmlDeviceGetCount()) for gpu in _at(nvml, index)]
    except pynvml.NVMLError_LibraryNotFound:
        return Listing(absence="there is no NVIDIA driver (libnvidia-ml.so.1 was not found)")
    except pynvml.NVMLError_DriverNotLoaded:
        return Listing(absence="the NVIDIA driver is not loaded; see nvidia-smi", trouble=True)
    except pynvml.NVMLError_NoPermission:
        return Listing(
            absence="this user has no permission for the NVIDIA driver; see ls -l /dev/nvidia*", trouble=True
        )
    except pynvml.NVMLError as error:
        return Listing(absence=f"NVML fails: {error}; see nvidia-smi", trouble=True)
    return Listing(tuple(found), "" if found else "the NVIDIA driver sees no GPU")


def visible(present: Listing, setting: str | None) -> Listing:
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
    return replace(present, gpus=tuple(chosen), absence="" if chosen else hidden)


def named(present: Sequence[Gpu]) -> dict[str, Gpu]:
    """Return the GPUs by the names of their devices: "cuda:0" ... for whole GPUs, "mig:0" ... for instances."""
    whole = [gpu for gpu in present if not gpu.is_instance]
    parts = [gpu for gpu in present if gpu.is_instance]
    return {
        f"{sort}:{index}": gpu for sort, each in (("cuda", whole), ("mig", parts)) for index, gpu in enumerate(each)
    }


@contextmanager
def binding() -> Iterator[Any]:
    """Initialise NVML, yield the module `pynvml`, and shut NVML down.

    Raises:
        ImportError: The package is not installed.
        pynvml.NVMLError: NVML cannot be initialised.
    """
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def read_gpu(nvml: Any, handle: Any) -> Gpu:
    """Read a GPU or an instance; after an error of NVML, return the data read before it, and the reason.

    Args:
        nvml: The module `pynvml`.
        handle: Handle of the GPU or the instance.
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
    """Return an error of NVML about a GPU as a reason."""
    match error:
        case nvml.NVMLError_GpuIsLost():
            return "has fallen off the bus"
        case nvml.NVMLError_ResetRequired():
            return "needs a reset"
        case nvml.NVMLError_NoPermission():
            return "cannot be read by this user (no permission for NVML)"
    return f"cannot be read by NVML: {error}"


def _at(nvml: Any, index: int) -> list[Gpu]:
    """Read the GPU with an index in NVML's order, or its instances."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        made = _instances(nvml, handle)
    except nvml.NVMLError as error:
        return [Gpu("", index=index, reason=trouble(nvml, error))]
    return [read_gpu(nvml, each) for each in made or [handle]]


def _instances(nvml: Any, handle: Any) -> list[Any] | None:
    """Return the handles of a GPU's instances; None if MIG is off.

    Raises:
        pynvml.NVMLError: The GPU cannot be read.
    """
    try:
        now, _ = nvml.nvmlDeviceGetMigMode(handle)
    except nvml.NVMLError_NotSupported:  # most GPUs
        return None
    if now != nvml.NVML_DEVICE_MIG_ENABLE:
        return None
    found = []
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(nvml.NVMLError_NotFound):  # a place without an instance
            found.append(nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place))
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
    plain = nvml.nvmlDeviceGetMemoryInfo(handle)  # of a driver that does not report its own memory
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


def _holders(nvml: Any, handle: Any) -> tuple[Holder, ...]:
    """List compute programs, clients of MPS and graphics programs; NVML has a list of each, and some are in two."""
    found: dict[int, int | None] = {}
    for sort in ("Compute", "MPSCompute", "Graphics"):
        for process in _query(nvml, f"nvmlDeviceGet{sort}RunningProcesses_v3", handle) or ():
            before, now = found.get(process.pid), process.usedGpuMemory
            found[process.pid] = before if now is None else max(before or 0, int(now))
    return tuple(Holder(pid, program(pid), memory) for pid, memory in found.items())


def _uncorrected(nvml: Any, handle: Any) -> int:
    kinds = (nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
    return int(_query(nvml, "nvmlDeviceGetTotalEccErrors", handle, *kinds) or 0)


def _flaw(nvml: Any, handle: Any, gpu: Gpu) -> str:
    """Return the reason why no job can use a readable GPU; "" if jobs can."""
    if gpu.compute_mode == "prohibited":
        return "compute mode prohibited"
    *_, beyond_repair = _query(nvml, "nvmlDeviceGetRemappedRows", handle) or (0,)
    if beyond_repair:
        return "ECC errors that cannot be corrected"
    if not gpu.is_instance and (made := _instances(nvml, handle)) is not None:
        return "MIG is on, and only its instances can be used" if made else "MIG is on, and no instance was made"
    return ""
