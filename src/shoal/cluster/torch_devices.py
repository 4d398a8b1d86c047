"""Accelerators that only torch knows, asked of it in a process of its own: the core imports no torch."""

import json
import subprocess
import sys
from dataclasses import dataclass

from shoal.core.errors import DeviceError

__all__ = ["Accelerator", "torch_devices"]

_QUESTIONS = {
    "mps": "[(torch.backends.mps.get_name(), torch.mps.recommended_max_memory())] "
    "if torch.backends.mps.is_available() else []",
    "xpu": "[(torch.xpu.get_device_name(i), torch.xpu.get_device_properties(i).total_memory) "
    "for i in range(torch.xpu.device_count())]",
}
"""By type, an expression that lists the model and the bytes of each device."""


@dataclass(frozen=True)
class Accelerator:
    """A device that is neither of NVIDIA's nor a CPU.

    Args:
        name: as torch calls it: "mps:0", "xpu:1".
        model: "Apple M2", "Intel(R) Data Center GPU Max 1100".
        memory: bytes that programs may hold.
    """

    name: str
    model: str
    memory: int


def torch_devices(sort: str) -> tuple[Accelerator, ...]:
    """The devices of a type, "mps" or "xpu"; takes as long as an import of torch.

    Raises:
        DeviceError: torch cannot be asked.
    """
    code = f"import json, torch; print(json.dumps({_QUESTIONS[sort]}))"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if asked.returncode:
        why = (asked.stderr.strip().splitlines() or [f"exit status {asked.returncode}"])[-1]
        raise DeviceError(f"torch cannot be asked for devices of type {sort!r}: {why}; use devices='cpu'")
    found = json.loads(asked.stdout.splitlines()[-1])
    return tuple(Accelerator(f"{sort}:{index}", *each) for index, each in enumerate(found))
