"""How jobs are bound to GPUs and slots by the local back end: real workers, a fake of NVIDIA's control program."""

import logging
from dataclasses import replace
from pathlib import Path

import mps_fakes as fakes
import pytest
from processes import gone
from shared_gpu_samples import (
    CPU,
    GIB,
    GPU,
    MIG,
    OTHER_GPU,
    begin,
    daemon_pid,
    job,
    local,
    program,
    run_on,
    servers,
    stopped,
)

from shoal.core.demand import Demand
from shoal.core.device import Cluster, Device, Node
from shoal.core.errors import BackendError
from shoal.core.job import Purpose
from shoal.run import Local, WorkerContext
from shoal.run.gpu_sharing import check_sharing
from shoal.testing.backends import scripted_job


class TestBinding:
    def test_a_job_has_the_share_that_it_was_promised_and_a_program_the_memory(self, place: Path) -> None:
        with local(place, fakes.uses_gpu) as backend:
            quarter = begin(backend, job("quarter"))
            assert (quarter["percentage"], quarter.get("megabytes")) == (25, None)
            most = begin(backend, job("most", compute=0.601))
            assert (most["percentage"], most.get("megabytes")) == (61, None)
            alone = begin(backend, replace(program("alone"), compute_limit=None, memory_limit=0))
            assert (alone["percentage"], alone.get("megabytes")) == (100, None)
            beside = begin(backend, program("beside"))
            assert (beside["percentage"], beside["megabytes"]) == (25, 1536)
            elsewhere = begin(backend, job("elsewhere"), OTHER_GPU)
            assert elsewhere["percentage"] == 25
            assert daemon_pid(place, "GPU-0") != daemon_pid(place, "GPU-1")
            assert run_on(backend) == []
            assert stopped(backend, "quarter", "most", "alone", "beside", "elsewhere")

    def test_one_process_finds_signatures_measures_and_trains(self, place: Path) -> None:
        trained = replace(job("trains", compute=1.0, memory=4 * GIB), compute_limit=None)
        jobs = [
            replace(scripted_job("signatures"), purpose=Purpose.SIGNATURE),
            replace(scripted_job("measures"), purpose=Purpose.PROFILE),
            trained,
            replace(trained, id="trains more", demand=Demand(0.5, 6 * GIB, 2.0, 10.0), memory_limit=7 * GIB),
        ]
        with local(place, fakes.uses_gpu) as backend:
            pids = set()
            for each in jobs:
                pids.add(begin(backend, each)["pid"])
                assert stopped(backend, each.id)
        assert len(pids) == 1

    @pytest.mark.parametrize(
        ("device", "name", "variables"),
        [
            pytest.param(GPU, "plain", 1, id="without MPS"),
            pytest.param(MIG, "auto", 1, id="part of a GPU"),
            pytest.param(GPU, "auto", 4, id="by MPS"),
        ],
    )
    def test_a_process_sees_its_device_alone(self, device: Device, name: str, variables: int, place: Path) -> None:
        with local(place, fakes.uses_gpu, name) as backend:
            assert begin(backend, job("job"), device)["set"] == variables
            assert stopped(backend, "job")

    def test_on_a_cpu_slot_nothing_is_set_and_any_job_uses_the_idle_worker(self, place: Path) -> None:
        with local(place, fakes.stays_off, "auto") as backend:
            one = begin(backend, job("one"), CPU)
            assert stopped(backend, "one")
            two = begin(backend, job("two", compute=1.0), CPU)
            assert stopped(backend, "two")
        assert one == two
        assert one["set"] == 0

    def test_an_idle_worker_is_used_again_for_the_same_binding_and_else_makes_room(self, place: Path) -> None:
        with local(place, fakes.uses_gpu) as backend:
            one = begin(backend, job("one"))
            assert stopped(backend, "one")
            two = begin(backend, job("two", memory=3 * GIB))
            assert stopped(backend, "two")
            assert two["pid"] == one["pid"]
            other = begin(backend, job("other", compute=0.5))
            assert other["pid"] != one["pid"]
            assert gone(one["pid"])
            assert stopped(backend, "other")

    def test_closing_ends_the_daemons(self, place: Path) -> None:
        with local(place, fakes.uses_gpu) as backend:
            begin(backend, job("job"))
            pids = [daemon_pid(place), *servers(place)]
            assert len(pids) == 2
        assert all(gone(pid) for pid in pids)


class TestWithoutMps:
    def test_auto_goes_on_and_says_why_once(self, place: Path, caplog: pytest.LogCaptureFixture) -> None:
        with local(place, fakes.uses_gpu, "auto", command="no-such-program") as backend:
            assert begin(backend, job("one"))["set"] == 1
            assert begin(backend, job("two"))["set"] == 1
            assert stopped(backend, "one", "two")
        (record,) = [each for each in caplog.records if each.name == "shoal.run"]
        assert record.levelno == logging.WARNING
        assert record.getMessage().startswith("jobs on cuda:0 share it without MPS: 'no-such-program' is not installed")

    @pytest.mark.parametrize(("name", "limited"), [("mps", True), ("plain", False)])
    def test_whether_processes_are_limited(self, name: str, limited: bool, place: Path) -> None:
        with local(place, fakes.uses_gpu, name) as backend:
            assert backend.can_limit_compute(GPU) is limited
            assert not backend.can_limit_compute(CPU)
            assert not backend.can_limit_compute(MIG)

    def test_no_process_is_limited_once_mps_has_failed(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", str(place), prepend=":")
        with local(place, fakes.uses_gpu, "auto", command="no-such-program") as backend:
            assert backend.can_limit_compute(GPU)
            begin(backend, job("one"))
            assert not backend.can_limit_compute(GPU)
            assert stopped(backend, "one")

    def test_mps_is_an_error(self, place: Path) -> None:
        with (
            local(place, fakes.uses_gpu, "mps", command="no-such-program") as backend,
            pytest.raises(BackendError, match=r"cuda:0 cannot be shared by MPS: 'no-such-program' is not installed"),
        ):
            backend.start(job("one"), GPU)


def cluster(*devices: Device) -> Cluster:
    return Cluster((Node("here", 8, devices),))


@pytest.mark.parametrize(
    ("name", "devices", "processes", "message"),
    [
        pytest.param("mpss", [GPU], True, r"unknown `sharing` 'mpss'.*did you mean 'mps'\?", id="typo"),
        pytest.param(["mps"], [GPU], True, "unknown `sharing` .'mps'.", id="a list"),
        pytest.param(None, [GPU], True, "unknown `sharing` None, known are 'auto', 'mps', 'plain'$", id="nothing"),
        pytest.param("mps", [GPU], False, "needs a process for each job; use backend='local'", id="one process"),
        pytest.param("mps", [GPU, CPU], True, r"cpu:0 \(cpu\) is not one", id="CPU slot"),
        pytest.param("mps", [MIG], True, r"mig:0 \(A100 MIG 1g.10gb\) is not one", id="MIG"),
        pytest.param("mps", [GPU], True, "which is not on PATH", id="not installed"),
    ],
)
def test_a_setting_that_cannot_be_had(
    name: object, devices: list[Device], processes: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/no/such/directory")
    with pytest.raises(BackendError, match=message):
        check_sharing(name, cluster(*devices), processes=processes)


def test_settings_that_can_be_had(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(place))
    check_sharing("mps", cluster(GPU, OTHER_GPU), processes=True)
    for name in ("auto", "plain"):
        check_sharing(name, cluster(CPU, MIG), processes=False)
    assert Local(WorkerContext(place / "study", b"", sharing="plain"))._sharing.name == "plain"
