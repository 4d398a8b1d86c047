"""`shoal devices` over an invented NVML."""

import json
import os

import psutil
import pynvml
import pytest
from nvml_samples import GB, Card, divided, instance
from typer.testing import CliRunner

from shoal.cli.app import app

SELF = os.getpid()
NAME = psutil.Process().name()
HIDDEN = 2**22 + 1


def devices(*options):
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["devices", *options])
    assert result.exit_code == 0, result.output
    return result


def lines(*options):
    return [line.rstrip() for line in devices(*options).stdout.splitlines()]


def columns(line):
    return [part.strip() for part in line.split("  ") if part.strip()]


@pytest.fixture
def many(nvml):
    nvml.cards = [
        Card("GPU-a", held=70 * GB, busy=97, compute=[(SELF, 69 * GB), (HIDDEN, None)]),
        Card("GPU-b", "NVIDIA A100", total=81 * GB, mode=pynvml.NVML_COMPUTEMODE_PROHIBITED),
        Card("GPU-c", failing={"": pynvml.NVMLError_GpuIsLost}),
        divided(instance("MIG-1")),
    ]


def test_a_line_a_device(many):
    cores = str(max(1, len(os.sched_getaffinity(0)) // 4))
    title, *rows = map(columns, lines())
    assert title == ["device", "kind", "memory", "free", "cores", "busy", "compute mode", "used by", "health"]
    processes = f"{NAME} (pid {SELF}) 69.0 GB, pid {HIDDEN}"
    assert rows == [
        ["cuda:0", "NVIDIA H200", "140.0 GB", "70.0 GB", cores, "97%", "default", processes, "ok"],
        ["cuda:1", "NVIDIA A100", "80.0 GB", "80.0 GB", cores, "0%", "prohibited", "–", "compute mode prohibited"],
        ["cuda:2", "unknown", "–", "–", cores, "–", "–", "–", "has fallen off the bus"],
        ["mig:0", "NVIDIA H200 MIG 1g.18gb", "18.0 GB", "18.0 GB", cores, "–", "default", "–", "ok"],
    ]


def test_the_same_for_programs(many):
    found = json.loads(devices("--json").stdout)
    assert found["no_gpu"] is None
    (node,) = found["nodes"]
    first, second, third, fourth = found["devices"]
    assert first == {
        "node": node["name"],
        "name": "cuda:0",
        "kind": "NVIDIA H200",
        "uuid": "GPU-a",
        "memory": 140 * GB,
        "free": 70 * GB,
        "cores": first["cores"],
        "compute_mode": "default",
        "utilisation": 97,
        "used_by": [
            {"pid": SELF, "name": NAME, "memory": 69 * GB},
            {"pid": HIDDEN, "name": f"pid {HIDDEN}", "memory": None},
        ],
        "healthy": True,
        "reason": None,
    }
    assert (second["healthy"], second["reason"]) == (False, "compute mode prohibited")
    assert (third["uuid"], third["memory"], third["free"], third["reason"]) == (
        *(None, None, None),
        "has fallen off the bus",
    )
    assert (fourth["uuid"], fourth["utilisation"]) == ("MIG-1", None)


@pytest.mark.parametrize(
    ("selection", "names"),
    [
        pytest.param("cuda:1", ["cuda:1"], id="one"),
        pytest.param("mig:0,cuda:0", ["mig:0", "cuda:0"], id="a list"),
        pytest.param("cpu:2", ["cpu:0", "cpu:1"], id="CPU slots"),
    ],
)
def test_a_selection(many, selection, names):
    assert [columns(line)[0] for line in lines("--devices", selection)[1:]] == names


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        pytest.param(pynvml.NVMLError_LibraryNotFound, "there is no NVIDIA driver", id="no driver"),
        pytest.param(
            pynvml.NVMLError_NoPermission, "this user has no permission for the NVIDIA driver", id="forbidden"
        ),
        pytest.param(None, "the NVIDIA driver sees no GPU", id="no GPU"),
    ],
)
def test_without_a_gpu_the_cpu_slots_and_why(nvml, error, reason):
    nvml.init_error = error
    shown = devices()
    assert [columns(line)[0] for line in shown.stdout.splitlines()[1:]] == [
        f"cpu:{index}" for index in range(len(shown.stdout.splitlines()) - 1)
    ]
    assert shown.stderr.splitlines()[-1].startswith(f"shoal: no GPU: {reason}")
    assert json.loads(devices("--json").stdout)["no_gpu"].startswith(reason)


def test_a_device_that_is_not_there_is_one_line_of_error(nvml):
    result = CliRunner().invoke(app, ["devices", "--devices", "cuda:7"])
    assert result.exit_code == 1
    assert str(result.exception).startswith("device 'cuda:7' is not there; this machine has cpu (")


def test_help():
    result = CliRunner().invoke(app, ["devices", "--help"])
    assert result.exit_code == 0
    assert "programs that use" in result.stdout
    assert " devices " in CliRunner().invoke(app, ["--help"]).stdout
