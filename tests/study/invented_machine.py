"""What a study sees of the invented devices, and how its jobs use them.

NVML is a module over a file which says what GPUs suffer from; the control program of MPS is a script. Jobs train on the
CPU, and do what CUDA does beside: each process becomes a client of the daemon that its environment names, and fails
when its server has died or its GPU is lost.
"""

import json
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

TESTS = Path(__file__).parents[1]
sys.path[1:1] = [str(TESTS / name) for name in ("run", "host") if str(TESTS / name) not in sys.path]

import chaos_task  # noqa: E402
import mps_fakes  # noqa: E402
import nvml_samples  # noqa: E402

from shoal.core.device import Cluster, Device, Node  # noqa: E402
from shoal.core.event import Event  # noqa: E402
from shoal.core.job import Job, Purpose, WorkerContext  # noqa: E402
from shoal.host.processes import is_alive  # noqa: E402
from shoal.run.gpu_sharing import GpuSharing  # noqa: E402
from shoal.run.local import Local  # noqa: E402
from shoal.run.mps import COMMAND, MpsDaemon  # noqa: E402
from shoal.run.mps_clients import SharedGpu  # noqa: E402
from shoal.run.registry import BACKENDS  # noqa: E402
from shoal.train.control import JobControl  # noqa: E402
from shoal.train.run import run  # noqa: E402

PLACE = "INVENTED_PLACE"
"""The variable that names the directory of all this; a short one, for the sockets in it."""

MIB = 2**20


def _gpu(index: int, kind: str, mib: int) -> Device:
    return Device(f"cuda:{index}", kind, mib * MIB, uuid=f"GPU-invented-{index}")


CLUSTER = Cluster(
    (
        Node("ash", 1, tuple(_gpu(index, "small", 500) for index in (0, 1, 2))),
        Node("beech", 1, (_gpu(3, "small", 500), _gpu(4, "large", 800), _gpu(5, "large", 800))),
        Node("cedar", 1, (_gpu(6, "large", 800), _gpu(7, "large", 800))),
    )
)


def make() -> None:
    """Make the machine, in the directory that the variable names."""
    mps_fakes.install(_file(""))
    suffer({})


def install() -> None:
    """Let a study of this process have the machine."""
    sys.modules["pynvml"] = InventedNvml()
    BACKENDS["local"] = InventedLocal


def suffer(ailments: dict[str, str]) -> None:
    """From now on these GPUs have what is said of them, and no others.

    Args:
        ailments: UUID -> name of an error of NVML's.
    """
    file = _file("ailments.json")
    file.with_suffix(".partial").write_text(json.dumps(ailments))
    file.with_suffix(".partial").replace(file)


def ailments() -> dict[str, str]:
    """As `suffer` was last told."""
    found: dict[str, str] = json.loads(_file("ailments.json").read_text())
    return found


def pipe(device: Device) -> Path:
    """The directory of a GPU's daemon, whether or not there is one."""
    return _file(device.uuid) / "pipe"


def _file(name: str) -> Path:
    return Path(os.environ[PLACE]) / name


class InventedNvml(nvml_samples.FakeNvml):
    """NVML of the machine: the GPUs of all nodes."""

    def __init__(self) -> None:
        cards = (nvml_samples.Card(x.uuid, x.kind, total=x.memory, reserved=0) for _, x in CLUSTER)
        super().__init__(*cards)

    def nvmlInit(self) -> None:  # noqa: N802
        super().nvmlInit()
        now = ailments()
        for card in self.cards:
            card.failing = {"": getattr(self, now[card.uuid])} if card.uuid in now else {}


class InventedLocal(Local):
    """The local back end, with daemons that are not NVIDIA's."""

    def __init__(self, worker_context: WorkerContext) -> None:
        worker_context = replace(worker_context, runner=f"{__name__}:{train.__name__}")
        super().__init__(worker_context, GpuSharing(worker_context.sharing, _daemon, shared_gpu=_shared_gpu))

    @classmethod
    def discover(cls, devices: str | Sequence[str]) -> Cluster:
        """The devices of all nodes."""
        return CLUSTER


def _daemon(uuid: str) -> MpsDaemon:
    return MpsDaemon(uuid, _file(uuid), command=str(_file(COMMAND)))


def _shared_gpu(device: str, daemon: MpsDaemon) -> SharedGpu:
    return SharedGpu(device, daemon, device_file=str(_file("nvidia-uvm")))


def train(job: Job, device: Device, worker_context: WorkerContext, control: JobControl) -> Iterator[Event]:
    """A runner: that of Shoal on the CPU, in a process which uses the GPU as CUDA would."""
    if job.purpose is not Purpose.SIGNATURE and _context.server is None:
        _context.make()
    chaos_task.trains = job.purpose is Purpose.TRAIN
    for event in run(job, replace(device, name="cpu:0", uuid=""), worker_context, control):
        yield event
        _context.check(device)


class _Context:
    """What CUDA keeps of a GPU in a process."""

    def __init__(self) -> None:
        self.server: int | None = None  # 0 without MPS

    def make(self) -> None:
        """Take hold of the GPU, as a client if the environment says so and there is a daemon."""
        self._file = _file("nvidia-uvm").open("w")
        self.server = 0
        place = os.environ.get("CUDA_MPS_PIPE_DIRECTORY")
        if place is not None and mps_fakes.connect(os.getpid(), place):
            self.server = _server(place)

    def check(self, device: Device) -> None:
        """What a kernel's launch says of a GPU or a server that is gone."""
        if device.uuid in ailments():
            raise RuntimeError("CUDA error: uncorrectable ECC error encountered")
        if self.server and not is_alive(self.server):
            raise RuntimeError("CUDA error: the MPS client is disconnected from its server")


def _server(place: str) -> int:
    with socket.socket(socket.AF_UNIX) as control:
        control.connect(f"{place}/control")
        control.sendall(b"get_server_list\n")
        answer = control.makefile().read()
    if not answer:
        raise RuntimeError("CUDA error: the MPS server has gone")
    return int(answer)


_context = _Context()
