"""What NVML says of real GPUs: listing, instances of MIG, conditions, new and lost devices, use by programs."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from gpu_tasks import Small
from typer.testing import CliRunner

from shoal.cli.app import app
from shoal.core.device import Cluster, Device
from shoal.core.errors import DeviceError
from shoal.core.job import WorkerContext
from shoal.host.discover import discover, take_inventory
from shoal.host.fleet import Fleet
from shoal.host.nvml import NvmlMonitor, by_device_name, gpus, visible_gpus
from shoal.programs.process import UsageMonitor, visible_device
from shoal.run.caller_fork import prepare_fork
from shoal.study.devices import DISCOVERY_SECONDS, DeviceWatch
from shoal.train.run import _torch_device, prepare

pytestmark = pytest.mark.gpu

MIB = 2**20


@pytest.fixture
def device() -> Device:
    return next(device for _, device in discover("auto") if device.healthy)


@pytest.fixture
def program() -> Iterator[subprocess.Popen[str]]:
    """A program that holds a gigabyte of the first GPU and keeps it busy."""
    code = (
        "import torch\n"
        "held = torch.zeros(1 << 30, dtype=torch.uint8, device='cuda:0')\n"
        "x = torch.ones(2048, 2048, device='cuda:0')\n"
        "torch.cuda.synchronize()\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    y = x @ x\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


def test_gpus_are_listed_with_what_torch_says_of_them() -> None:
    listing = visible_gpus(gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    assert listing.absence_reason == ""
    first = listing.gpus[0]
    properties = torch.cuda.get_device_properties(0)
    assert first.uuid.startswith(("GPU-", "MIG-"))
    assert str(properties.uuid) in first.uuid
    assert first.reason == ""
    assert properties.total_memory * 0.9 < first.memory < properties.total_memory * 1.1
    assert 0 < first.free <= first.memory
    if not first.is_instance:
        assert first.model == properties.name
        assert len([gpu for gpu in listing.gpus if not gpu.is_instance]) == torch.cuda.device_count()


def test_instances_of_mig_stand_in_place_of_their_gpu() -> None:
    instances = [gpu for gpu in gpus().gpus if gpu.is_instance]
    if not instances:
        with pytest.raises(DeviceError, match="'mig' is not there"):
            discover("mig")
        return
    named = by_device_name(gpus().gpus)
    assert [name for name in named if name.startswith("mig:")] == [f"mig:{index}" for index in range(len(instances))]
    assert all("MIG" in gpu.model and gpu.memory > 0 for gpu in instances)
    assert {device.uuid for _, device in discover("mig")} == {gpu.uuid for gpu in instances}


def test_names_and_uuids_select_a_gpu(device: Device) -> None:
    present = gpus()
    assert [gpu.uuid for gpu in visible_gpus(present, device.uuid).gpus] == [device.uuid]
    assert visible_gpus(present, "99").absence_reason != ""
    assert [each.name for _, each in discover([device.name])] == [device.name]


def test_a_process_is_bound_to_its_gpu_by_the_uuid(device: Device) -> None:
    shown = "torch.cuda.device_count(), torch.cuda.get_device_properties(0).uuid, torch.cuda.utilization(0)"
    code = f"import torch; print({shown})"
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": device.uuid}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    count, uuid, utilisation = done.stdout.split()
    assert count == "1"
    assert uuid in device.uuid
    assert 0 <= int(utilisation) <= 100


def test_a_worker_uses_the_device_of_its_job(device: Device, tmp_path: Path) -> None:
    assert _torch_device(device).type == "cuda"
    threads = torch.get_num_threads()
    try:
        state, _ = prepare(device, WorkerContext(tmp_path, Small.pickled()))
    finally:
        torch.set_num_threads(threads)
    assert state.device == _torch_device(device)
    assert torch.cuda.current_device() == state.device.index


def test_all_is_well_and_this_process_is_no_other_program(device: Device) -> None:
    held = torch.ones(64 * MIB, device="cuda:0")
    monitor = NvmlMonitor(Cluster(discover("auto").nodes))
    condition = monitor.conditions({os.getpid()})[device.name]
    assert condition.healthy
    assert os.getpid() not in [process.pid for process in condition.processes]
    assert float(held.sum()) == 64 * MIB


def test_a_program_of_others_is_seen_with_its_memory(device: Device, program: subprocess.Popen[str]) -> None:
    cluster = discover([device.name])
    processes = NvmlMonitor(cluster).conditions({1 << 30})[device.name].processes
    assert sum(process.memory or 0 for process in processes) >= 1 << 30


def test_a_gpu_that_is_not_there_is_lost_and_the_others_are_not(device: Device) -> None:
    gone = replace(device, name="cuda:7", uuid="GPU-00000000-0000-0000-0000-000000000000")
    cluster = discover([device.name])
    (node,) = cluster.nodes
    seen = NvmlMonitor(Cluster((replace(node, devices=(*node.devices, gone)),))).conditions({os.getpid()})
    assert seen[device.name].healthy
    assert not seen["cuda:7"].healthy
    assert seen["cuda:7"].reason


def test_a_study_that_began_without_one_of_the_gpus_takes_it_in() -> None:
    there = discover("cuda")
    fleet = Fleet(there.select(lambda device: device.name == "cuda:0"), "cuda")
    now = 0.0
    watch = DeviceWatch(fleet, discover, NvmlMonitor, lambda: now, os.getpid())
    now = DISCOVERY_SECONDS
    seen = watch.poll()
    assert seen is not None
    others = [device.name for _, device in there if device.name != "cuda:0"]
    assert [device.name for device in fleet.add_discovered(seen.discovered or there)] == others


def test_the_use_of_a_program_is_measured(device: Device) -> None:
    code = (
        "import time, torch\n"
        "input()\n"
        "held = torch.zeros(1 << 30, dtype=torch.uint8, device='cuda:0')\n"
        "x = torch.ones(2048, 2048, device='cuda:0')\n"
        "end = time.monotonic() + 4\n"
        "print('ready', flush=True)\n"
        "while time.monotonic() < end:\n"
        "    (x @ x).sum().item()\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": visible_device(device)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        monitor = UsageMonitor(lambda: [psutil.Process(process.pid)], device)
        print(file=process.stdin, flush=True)
        assert process.stdout.readline() == "ready\n"
        monitor.report(1.0)
        time.sleep(2.0)
        profile = monitor.report(1.0)
    assert profile is not None
    assert profile.base_memory >= 1 << 30
    assert profile.compute > 0.1


def test_a_process_with_a_driver_open_is_not_forked() -> None:
    torch.ones(1, device="cuda:0")
    reason = prepare_fork()
    assert reason is not None
    assert "/dev/nvidia" in reason or "threads" in reason


def test_the_command_shows_the_gpu(device: Device) -> None:
    result = CliRunner().invoke(app, ["devices", "--json"])
    assert result.exit_code == 0, result.output
    assert device.name in result.output
    assert device.kind in result.output
    assert take_inventory("auto").gpus
