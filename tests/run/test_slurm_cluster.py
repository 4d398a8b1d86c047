"""What is asked of Slurm's commands, and the head of the Ray cluster, with the user's own settings of Ray."""

import io
import json
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest
from slurm_clusters import end_ray, fake_cluster

from shoal.core.errors import BackendError
from shoal.host.machine import own_addresses
from shoal.run.nodes.inventory import versions
from shoal.run.nodes.ray import Ray
from shoal.run.nodes.slurm import Slurm
from shoal.run.nodes.slurm_cluster import ClusterHead, _address_towards, _in_lasting_thread, be_node
from shoal.run.nodes.slurm_commands import SlurmNode, allocated_nodes, cancel, controller, requested_nodes

ray = pytest.importorskip("ray")

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cluster of one node, and no Ray of this process."""
    monkeypatch.setattr(Slurm, "_sbatch", None)
    with fake_cluster(tmp_path / "slurm", monkeypatch, ["ash"]), end_ray():
        ray.shutdown()
        Ray.leave_head()
        yield


@pytest.mark.parametrize(
    ("sbatch", "message"),
    [
        pytest.param(None, "is for a process in an allocation, and SLURM_JOB_ID is not set; .*--sbatch", id="outside"),
        pytest.param(
            "--partition=nope",
            "partition specified: nope .* called with --sbatch '--partition=nope', and sinfo lists the partitions",
            id="partition",
        ),
        pytest.param("--nodes=2-4", "--nodes among its options is their number.* got '--nodes=2-4'", id="range"),
        pytest.param("-N 100000000", "at most 10000", id="too many"),
        *[pytest.param(each, "there is no --array", id=each) for each in ("--arra=0-3", "-a1-4", "--wait", "--wrap=x")],
        pytest.param("-N 0", "--nodes among its options is their number.* got '-N 0'", id="none"),
        pytest.param("--array=1-4", "there is no --array or .* got '--array=1-4'", id="array"),
        pytest.param("--comment='", "--sbatch takes options of sbatch, got .*No closing quotation", id="quote"),
    ],
)
@pytest.mark.usefixtures("slurm")
def test_wrong_options_are_refused(sbatch: str | None, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        Slurm.connect(sbatch=sbatch)


def test_slurm_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BackendError, match="back end 'slurm' needs 'srun', which is not on PATH"):
        Slurm.connect()
    with pytest.raises(BackendError, match="back end 'slurm' needs 'sbatch', which is not on PATH"):
        Slurm.connect(sbatch="--nodes=2")


@pytest.mark.parametrize(
    ("options", "number"),
    [("", 1), ("-N4", 4), ("-N 4 -n 8", 4), ("--nodes=4 -p gpu", 4), ("--nodes 4", 4), ("-p gpu --time=1:00", 1)],
)
def test_the_number_of_nodes_is_that_of_sbatch(options: str, number: int) -> None:
    assert requested_nodes(options) == number


def test_the_share_of_each_node_is_read_from_slurm() -> None:
    text = """JobId=4 JobName=job.sh
   JobState=RUNNING Reason=None Dependency=(null)
   NodeList=ash,beech[1-2],cedar
     Nodes=ash CPU_IDs=0-3,8,10-11 Mem=4096 GRES=gpu:a100:2(IDX:0-1),gpu:t4:1(IDX:2)
     Nodes=beech[1-2] CPU_IDs=0 Mem=0 GRES=
     Nodes=cedar CPU_IDs=5 Mem=0 GRES=gpu:4(IDX:0-3),shard:9(1/4,8/8)
   MinCPUsNode=1 MinMemoryNode=0 MinTmpDiskNode=0
"""
    names = {"beech[1-2]": ["beech1", "beech2"]}
    assert allocated_nodes(text, lambda each: names.get(each, [each])) == [
        SlurmNode("ash", 7, 3),
        SlurmNode("beech1", 1, 0),
        SlurmNode("beech2", 1, 0),
        SlurmNode("cedar", 1, 4),
    ]


@pytest.mark.parametrize(
    ("said", "warned"),
    [
        ("scancel: error: Kill job error on job id 7: Invalid job id specified", False),
        ("scancel: error: Kill job error on job id 7: Access/permission denied", True),
    ],
)
def test_jobs_that_cannot_be_cancelled_are_named(
    said: str, warned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    program = tmp_path / "scancel"
    program.write_text(f"#!/bin/sh\necho '{said}' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    cancel(["7", "8"])
    assert (f"scancel failed: {said}; end them with: scancel 7 8" in caplog.text) is warned


def test_ray_starts_in_a_thread_that_lasts_and_its_failure_restores_what_was_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads, ended = [], []

    def fail(**options: object) -> None:
        threads.append(threading.current_thread())
        assert os.environ["RAY_AUTH_MODE"] == "token"
        assert "RAY_AUTH_TOKEN" not in os.environ
        raise ray.exceptions.AuthenticationError("no token")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail)
    monkeypatch.setattr(ray, "shutdown", lambda: ended.append(True))
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the user's")
    before = dict(os.environ)
    with ThreadPoolExecutor(1) as pool:
        with pytest.raises(BackendError, match="Ray could not start the head of a cluster on this machine: no token"):
            pool.submit(ClusterHead, "").result()
        assert threads[0] is not pool.submit(threading.current_thread).result()
        assert ended
        assert os.environ == before
        lasting = pool.submit(lambda: _in_lasting_thread(lambda: threads.append(threading.current_thread())))
        lasting.result()
    assert threads[1].is_alive()


@pytest.mark.usefixtures("slurm")
def test_a_cluster_of_the_users_own_is_not_mistaken_for_that_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "the user's")
    before = dict(os.environ)
    Slurm.connect(sbatch="")
    assert "RAY_AUTH_TOKEN" not in os.environ
    with pytest.raises(BackendError, match=r"of back end 'slurm', and back end 'ray' .*; call ray\.shutdown\(\) first"):
        Ray.connect()
    ray.shutdown()
    with pytest.raises(BackendError, match=r"no Ray cluster answers at '127\.0\.0\.1:1'"):
        Ray.connect("127.0.0.1:1")
    assert {name: os.environ.get(name) for name in before} == before
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ


@pytest.mark.usefixtures("slurm")
def test_the_controller_is_that_of_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert controller() == "127.0.0.1"
    monkeypatch.setenv("PATH", "/nowhere")
    assert controller() == ""


def test_the_address_of_a_machine_is_that_which_a_peer_reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    *outside, loopback = own_addresses()
    for address in outside:
        assert _address_towards(address) == address
    assert _address_towards(loopback) == own_addresses()[0]
    monkeypatch.setattr(socket.socket, "connect", no_such_host)
    assert _address_towards("nowhere") == own_addresses()[0]


def no_such_host(*arguments: object) -> None:
    raise socket.gaierror


def test_a_node_that_cannot_reach_the_engine_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    contact = {"address": "127.0.0.1:1", "token": "", "versions": versions()}
    monkeypatch.setattr(sys, "argv", ["-c", "", "label"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(contact)))
    monkeypatch.setenv("SLURMD_NODENAME", "ash")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(SystemExit, match=r"^node ash cannot reach the engine at 127\.0\.0\.1:1: .* refused; run the "):
        be_node()


def test_a_ray_without_what_a_token_needs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setitem(sys.modules, "ray._raylet", ModuleType("ray._raylet"))
    with pytest.raises(
        BackendError,
        match=rf"made with Ray 2\.60, and the installed Ray {re.escape(ray.__version__)} .*: pip install 'ray==2\.60\.",
    ):
        ClusterHead("")
