"""The NVIDIA GPUs of this machine, as NVML and `CUDA_VISIBLE_DEVICES` show them; no CUDA context is made."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.cluster.gpu import Gpu, binding, instances, read_gpu, trouble

__all__ = ["Listing", "gpus", "named", "visible"]


@dataclass(frozen=True)
class Listing:
    """The GPUs that were found.

    Args:
        gpus: those that can be used, and those that cannot with the reason.
        absence: why there are none; "" if there are.
        trouble: whether there should be some, as a driver is there that fails.
    """

    gpus: tuple[Gpu, ...] = ()
    absence: str = ""
    trouble: bool = False


def gpus() -> Listing:
    """All GPUs in NVML's order; instead of a GPU that MIG divides, its instances."""
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
    """The GPUs that `CUDA_VISIBLE_DEVICES` leaves, in its order.

    As in CUDA, the list ends before the first entry that names no GPU. The index of a GPU that MIG divides stands for
    all its instances.

    Args:
        present: all GPUs, in the order of the PCI bus. With GPUs of different models CUDA counts in that order only
            under `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
        setting: the variable's value: indices or the beginnings of UUIDs, of instances too, separated by commas; None
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
    """The GPUs by the names of their devices: "cuda:0" ... for whole ones, "mig:0" ... for instances."""
    whole = [gpu for gpu in present if not gpu.is_instance]
    parts = [gpu for gpu in present if gpu.is_instance]
    return {
        f"{sort}:{index}": gpu for sort, each in (("cuda", whole), ("mig", parts)) for index, gpu in enumerate(each)
    }


def _at(nvml: Any, index: int) -> list[Gpu]:
    """The GPU with an index in NVML's order, or its instances."""
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        made = instances(nvml, handle)
    except nvml.NVMLError as error:
        return [Gpu("", index=index, reason=trouble(nvml, error))]
    return [read_gpu(nvml, each) for each in made or [handle]]
