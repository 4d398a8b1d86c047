from pathlib import Path

import baselines
import pytest
from baselines import BASELINE_PACKINGS, BASELINE_POLICIES
from hypothesis import settings
from schedule_samples import cluster, gpu, job, needs, placed, refused
from typer.testing import CliRunner

from shoal.cli.app import app
from shoal.core.device import Cluster, Node
from shoal.core.errors import PolicyError
from shoal.plan.schedule import POLICIES, WFD, Fifo, check_plan, make_policy, registry
from shoal.plan.schedule.registry import BASELINES
from shoal.testing.policies import check_policy

TWO = cluster(gpu(0), gpu(1))


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("made", [*POLICIES.values(), *BASELINE_POLICIES.values()], ids=lambda made: made.__name__)
def test_every_policy_conforms(made):
    check_policy(made, examples=settings.default.max_examples // 2)


def test_every_baseline_is_named_by_the_registries():
    assert sorted(BASELINES) == sorted([*BASELINE_POLICIES, *BASELINE_PACKINGS])


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(["run", "search.py", "--policy", "round_robin"], id="run"),
        pytest.param(["run", "search.py", "--packing", "knn"], id="run, a packing"),
        pytest.param(["simulate", "search.toml", "--policy", "slaq"], id="simulate"),
        pytest.param(["simulate", "search.toml"], id="a scenario"),
    ],
)
def test_a_baseline_is_refused_with_its_place(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("search.py").write_text("")
    nodes = '[[nodes]]\nkind = "A100"\ndevices = 1\nmemory_gb = 80\n'
    Path("search.toml").write_text(f'policies = ["fifo", "best_fit"]\n{nodes}')
    done = CliRunner().invoke(app, command)
    assert done.exit_code == (2 if len(command) > 2 else 1)
    said = " ".join((done.output or str(done.exception)).replace("│", " ").split())
    assert "is a baseline of the papers, to compare with: benchmarks/baselines of Shoal's source tree has it" in said


def test_baselines_that_are_registered_are_known(monkeypatch):
    monkeypatch.setattr(registry, "POLICIES", dict(POLICIES))
    with pytest.raises(PolicyError, match=r"'slaq' is a baseline of the papers"):
        make_policy("slaq")
    monkeypatch.setattr(baselines, "POLICIES", registry.POLICIES)
    monkeypatch.setattr(baselines, "PACKINGS", {})
    baselines.register()
    assert isinstance(make_policy("slaq"), baselines.Slaq)


def plan(policy, jobs, where):
    """A plan that was checked."""
    answer = policy.plan(jobs, where, now=0.0)
    check_plan(answer, jobs, where, 0.0)
    return placed(answer), refused(answer)


WFD_TABLE = {
    "longest first": (
        TWO,
        [job("a", seconds=1), job("b", seconds=3), job("c", seconds=2)],
        {"b": "cuda:0", "c": "cuda:1", "a": "cuda:0"},
    ),
    "equal lengths: oldest first, devices in order": (
        TWO,
        [job("a"), job("b"), job("c")],
        {"a": "cuda:0", "b": "cuda:1", "c": "cuda:0"},
    ),
    "what remains falls with every assignment": (
        TWO,
        [job("a", compute=0.4, seconds=3), job("b", compute=0.2, seconds=2), job("c", compute=0.3, seconds=1)],
        {"a": "cuda:0", "b": "cuda:1", "c": "cuda:1"},
    ),
    "what runs is charged first": (
        TWO,
        [job("old", compute=0.5, on="cuda:0"), job("a")],
        {"a": "cuda:1"},
    ),
    "a job that fits nowhere does not hold up the next": (
        cluster(gpu(0)),
        [job("a", compute=0.7, seconds=9), job("b", compute=0.7, seconds=8), job("c", compute=0.3, seconds=7)],
        {"a": "cuda:0", "c": "cuda:0"},
    ),
    "memory is hard": (
        cluster(gpu(0, memory=10), gpu(1, memory=40)),
        [job("a", compute=0.1, memory=12)],
        {"a": "cuda:1"},
    ),
    "the emptiest device may be the wrong kind": (
        cluster(gpu(0, kind="H200"), gpu(1)),
        [job("old", compute=0.5, on="cuda:1"), job("a", compute=0.2)],
        {"a": "cuda:1"},
    ),
    "compute is oversubscribed": (
        cluster(gpu(0, oversubscription=2.0)),
        [job("a", compute=0.9), job("b", compute=0.9), job("c", compute=0.9)],
        {"a": "cuda:0", "b": "cuda:0"},
    ),
    "tenths that sum to one fit": (
        cluster(gpu(0)),
        [job(name, compute=0.1) for name in "abcdefghij"],
        dict.fromkeys("abcdefghij", "cuda:0"),
    ),
    "cores are those of the node, not of each device": (
        cluster(gpu(0), gpu(1), cores=5),
        [job("a", cores=3), job("b", cores=3), job("c", cores=2)],
        {"a": "cuda:0", "c": "cuda:1"},
    ),
    "another node has its own cores": (
        Cluster((Node("n0", 4, (gpu(0),)), Node("n1", 4, (gpu(1),)))),
        [job("a", cores=3), job("b", cores=3)],
        {"a": "cuda:0", "b": "cuda:1"},
    ),
    "a job on an unhealthy device still uses its node's cores": (
        cluster(gpu(0, healthy=False), gpu(1), cores=4),
        [job("old", cores=3, on="cuda:0"), job("a", cores=2), job("b", cores=1)],
        {"b": "cuda:1"},
    ),
    "a job on a device that is gone uses nothing": (
        TWO,
        [job("old", on="cuda:9"), job("a", compute=1.0), job("b", compute=1.0)],
        {"a": "cuda:0", "b": "cuda:1"},
    ),
    "run time is that of the fastest kind here": (
        cluster(gpu(0)),
        [
            job("a", {"A100": needs(compute=0.8, seconds=5), "H200": needs(seconds=1)}),
            job("b", {"A100": needs(compute=0.8, seconds=4)}),
        ],
        {"a": "cuda:0"},
    ),
    "no jobs": (TWO, [], {}),
}


@pytest.mark.parametrize("name", WFD_TABLE)
def test_wfd(name):
    where, jobs, expected = WFD_TABLE[name]
    starts, refusals = plan(WFD(), jobs, where)
    assert list(starts.items()) == list(expected.items())
    assert set(starts) | set(refusals) == {view.id for view in jobs if not view.devices}


FIFO_TABLE = {
    "one job a device, oldest first": (
        TWO,
        [job("a", compute=0.1, seconds=1), job("b", compute=0.1, seconds=9), job("c", compute=0.1)],
        {"a": "cuda:0", "b": "cuda:1"},
    ),
    "a device that holds a job is not idle": (TWO, [job("old", compute=0.1, on="cuda:0"), job("a")], {"a": "cuda:1"}),
    "the first device that fits": (
        cluster(gpu(0, memory=10), gpu(1, healthy=False), gpu(2, memory=40)),
        [job("a", memory=12)],
        {"a": "cuda:2"},
    ),
    "a job that has to wait does not hold up the next": (
        cluster(gpu(0, memory=10)),
        [job("a", memory=12), job("b", memory=9)],
        {"b": "cuda:0"},
    ),
}


@pytest.mark.parametrize("name", FIFO_TABLE)
def test_fifo(name):
    where, jobs, expected = FIFO_TABLE[name]
    starts, _ = plan(Fifo(), jobs, where)
    assert list(starts.items()) == list(expected.items())


REASONS = {
    "all are busy": (TWO, [job("x", on="cuda:0"), job("y", on="cuda:1")], "waits for a free device: all 2 are busy"),
    "the only one is busy": (cluster(gpu(0)), [job("x", on="cuda:0")], "waits for a free device: cuda:0 is busy"),
    "a smaller one is idle": (
        cluster(gpu(0), gpu(1), gpu(2, memory=1)),
        [job("x", on="cuda:0"), job("y", on="cuda:1")],
        "waits for a free device: all 2 that can hold it are busy",
    ),
    "memory is taken": (
        TWO,
        [job("x", compute=0.1, memory=75.8, on="cuda:0"), job("y", compute=0.1, memory=79, on="cuda:1")],
        "needs 9.1 GB, cuda:0 has 4.2 GB free",
    ),
    "little memory is left": (
        cluster(gpu(0)),
        [job("x", compute=0.1, memory=79.65, on="cuda:0")],
        "needs 9.1 GB, cuda:0 has 350 MB free",
    ),
    "cores are taken": (
        cluster(gpu(0), gpu(1), cores=4),
        [job("x", compute=0.1, cores=2.5, on="cuda:0")],
        "needs 2 CPU cores, node n0 has 1.5 free",
    ),
    "no device": (cluster(), [], "no healthy device"),
    "none is healthy": (cluster(gpu(0, healthy=False)), [], "no healthy device"),
    "of another kind": (
        cluster(gpu(0, kind="H200")),
        [],
        "can never run here: it runs on A100, the devices are H200",
    ),
    "too large for any": (
        cluster(gpu(0, memory=8), gpu(1, memory=9)),
        [],
        "can never run here: needs 9.1 GB, the largest device cuda:1 has 9.0 GB",
    ),
    "too much compute for any": (
        cluster(gpu(0, compute=0.5)),
        [],
        "can never run here: needs 0.8 of a device's compute, cuda:0 offers 0.5",
    ),
    "too many cores": (cluster(gpu(0), cores=1), [], "can never run here: needs 2 CPU cores, node n0 has 1"),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_refusal_says_what_is_missing(name):
    where, running, reason = REASONS[name]
    waits = job("waits", compute=0.8, memory=9.1, cores=2)
    _, refusals = plan(WFD(), [*running, waits], where)
    assert refusals == {"waits": reason}


def test_fifo_treats_a_device_with_a_job_as_busy():
    _, refusals = plan(Fifo(), [job("x", compute=0.1, on="cuda:0"), job("a", compute=0.1)], cluster(gpu(0)))
    assert refusals == {"a": "waits for a free device: cuda:0 is busy"}


def test_reasons_describe_the_cluster_after_the_plan():
    jobs = [job("a", compute=0.1, memory=50, seconds=1), job("b", compute=0.1, memory=60, seconds=2)]
    _, refusals = plan(WFD(), jobs, cluster(gpu(0)))
    assert refusals == {"a": "needs 50.0 GB, cuda:0 has 20.0 GB free"}


def test_wfd_fills_hypersacks_cluster_nearly_whole():
    """SP4 on 16 GPUs (HyperSack, table of occupancies): 384 jobs of 22 % to 50 % of a device."""
    where = cluster(*(gpu(index, oversubscription=3.0) for index in range(16)), cores=1000)
    jobs = [job(str(index), compute=0.22 + 0.28 * (index * 37 % 384) / 384, seconds=index % 50) for index in range(384)]
    starts, _ = plan(WFD(), jobs, where)
    used = sum(view.demand["A100"].compute for view in jobs if view.id in starts)
    assert used / (16 * 3.0) > 0.95
