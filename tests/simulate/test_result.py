"""What is made of outcomes: a table, JSON."""

import json
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from simulate_samples import cluster, simulation, structure

from shoal.cli.simulate import faults, outcome_json, outcomes_table
from shoal.plan.schedule import WFD, Fifo
from shoal.simulate.run import ClusterEvent
from shoal.simulate.scenario import Scenario

JOBS = tuple(structure(f"j{i}", seconds=100.0 + i, compute=0.5) for i in range(4))
SCENARIO = Scenario(
    name="four",
    description="four jobs",
    cluster=cluster(1),
    sources=(),
    events=(),
    slowdown="none",
    policies=("fifo", "wfd"),
    objective="makespan",
    fuse=False,
    packing="none",
    measured=True,
    checkpoint_every=1.0,
    tick=0.0,
    data=None,
)


@pytest.fixture(scope="module")
def outcomes():
    return {name: simulation(JOBS, cluster(1), policy).run() for name, policy in (("fifo", Fifo()), ("wfd", WFD()))}


def test_table(outcomes):
    console = Console(width=200)
    with console.capture() as captured:
        console.print(outcomes_table(SCENARIO, outcomes))
    lines = captured.get().splitlines()
    assert lines[0].strip() == "four: four jobs"
    assert "makespan*" in lines[1]
    assert "to target" not in lines[1]
    cells = [line.split() for line in lines[2:4]]
    assert [row[:2] for row in cells] == [["fifo", "6:46"], ["wfd", "3:23"]]
    assert cells[0][4:7] == ["50%", "406", "4/4"]


def test_json(outcomes):
    found = json.loads(json.dumps(outcome_json(SCENARIO, "fifo", outcomes["fifo"])))
    assert (found["scenario"], found["policy"], found["makespan"], found["switches"]) == ("four", "fifo", 406, 0)
    assert found["completion"] == {"job/0": 100, "job/1": 201, "job/2": 303, "job/3": 406}
    stay = {"trial": "job/0", "trials": 1, "device": "gpu0", "begin": 0, "end": 100, "compute": 0.5}
    assert found["intervals"][0] == stay


def test_a_policy_under_which_nothing_ends_is_not_the_best(outcomes):
    none = simulation(JOBS, cluster(1), Fifo(), events=[ClusterEvent(10.0, failed=("gpu0",))]).run()
    console = Console(width=200, height=25, record=True, file=StringIO(), force_terminal=True)
    console.print(outcomes_table(SCENARIO, {"lost": none, **outcomes}))
    lines = console.export_text(styles=True).splitlines()[2:]
    assert ["\x1b[1m" in line for line in lines[:3]] == [False, False, True]
    assert lines[0].split()[:4] == ["lost", "-", "-", "-"]
    found = json.loads(json.dumps(outcome_json(SCENARIO, "lost", none), allow_nan=False))
    assert found["makespan"] is None
    assert found["mean_occupancy"] == 0


def test_faults():
    lost = simulation([structure("a"), structure("b", memory=99)], cluster(1), Fifo()).run()
    assert faults({"fifo": lost}) == [
        "fifo: 1 jobs still waiting at the end, such as job/1: can never run here: needs 99.0 GB, the largest device "
        "gpu0 has 80.0 GB"
    ]
    events = [ClusterEvent(10.0, failed=("gpu0",))]
    late = simulation([structure("a", seconds=20)], cluster(1), Fifo(), events=events).run()
    assert faults({"fifo": late}) == [
        "fifo: 1 jobs still waiting at the end, such as job/0: no healthy device: gpu0 is lost: has failed"
    ]


def test_names_are_shown_as_they_are(outcomes):
    odd = replace(SCENARIO, description="[bold] $a^{$ [/nope]")
    console = Console(width=200, record=True, file=StringIO())
    console.print(outcomes_table(odd, outcomes))
    assert "[bold] $a^{$ [/nope]" in console.export_text()
