"""The NVIDIA GPUs of this machine, as NVML and `CUDA_VISIBLE_DEVICES` show them; no CUDA context is made."""

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import DeviceError

__all__ = ["Gpu", "gpus", "visible"]


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Args:
        uuid: "GPU-...", the same in every process and container.
        model: "NVIDIA H200".
        memory: bytes in all, those that other programs hold included.
    """

    uuid: str
    model: str
    memory: int


def gpus() -> list[Gpu]:
    """All GPUs in NVML's order, which is that of the PCI bus; none where NVML is missing or finds no driver.

    Raises:
        DeviceError: NVML works but cannot say what a GPU is; one has fallen off the bus, for example.
    """
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [
            Gpu(
                uuid=pynvml.nvmlDeviceGetUUID(handle),
                model=pynvml.nvmlDeviceGetName(handle),
                memory=int(pynvml.nvmlDeviceGetMemoryInfo(handle).total),
            )
            for handle in handles
        ]
    except pynvml.NVMLError as error:
        raise DeviceError(f"NVML cannot read the GPUs: {error}; look at nvidia-smi, or use devices='cpu'") from error
    finally:
        pynvml.nvmlShutdown()


def visible(present: Sequence[Gpu], setting: str | None) -> list[Gpu]:
    """The GPUs that `CUDA_VISIBLE_DEVICES` leaves, in its order; entry i is torch's "cuda:i".

    As in CUDA, the list ends before the first entry that names no GPU.

    Args:
        present: all GPUs, in the order of the PCI bus. With GPUs of different models CUDA counts in that order only
            under `CUDA_DEVICE_ORDER=PCI_BUS_ID`.
        setting: the variable's value: indices or the beginnings of UUIDs, separated by commas; None when unset.
    """
    if setting is None:
        return list(present)
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in setting.split(",")):
        if entry.isdecimal():
            match = present[int(entry) : int(entry) + 1]
        else:
            match = [gpu for gpu in present if entry and gpu.uuid.startswith(entry)]
        if len(match) != 1:
            break
        chosen.extend(match)
    return chosen
