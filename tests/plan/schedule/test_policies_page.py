"""docs/policies.md says of every policy what it needs: its plans depend on that, and on nothing else of a job."""

import inspect
import re
from dataclasses import replace
from pathlib import Path

import pytest
from schedule_samples import cluster, gpu, needs, running, suspended, turn, waiting

from shoal.plan.cost.scaling import Scaling
from shoal.plan.schedule.auto import OBJECTIVES, Auto
from shoal.plan.schedule.base import JobView
from shoal.plan.schedule.registry import POLICIES

PAGE = Path(__file__).parents[3] / "docs" / "policies.md"
SECTION = PAGE.read_text().partition("### What each policy needs\n")[2].partition("\n### ")[0]
ROWS = [tuple(cell.strip() for cell in row.split("|")) for row in re.findall(r"^\| (`.*) \|$", SECTION, re.MULTILINE)]
NEEDS = {name: need for names, need, _ in ROWS for name in re.findall(r"`(\w+)`", names)}
MISSING = {name: text for names, _, text in ROWS for name in re.findall(r"`(\w+)`", names)}

WHERE = cluster(gpu(0))
FALLING = turn(2.0, 1.0), turn(1.0, 0.5)
STANDING = turn(2.0, 1.9), turn(1.9, 1.8)
AT_THE_GOAL = turn(2.0, 1.0), turn(1.0), turn(1.0), turn(1.0)


def with_demand(job: JobView, **amounts: float) -> JobView:
    return replace(job, demand={"A100": needs(**amounts)})


def pair(one: JobView, other: JobView, **amounts: tuple[float, float]) -> list[JobView]:
    """Two jobs with amounts of their own."""
    first, second = ({name: values[index] for name, values in amounts.items()} for index in (0, 1))
    return [with_demand(one, **first), with_demand(other, **second)]


def scaled(scaling: Scaling) -> list[JobView]:
    return [replace(each, scaling=scaling) for each in pair(waiting("a"), waiting("b"), compute=(1.0, 1.0))]


CHANGES = {
    "compute": [
        (pair(waiting("a"), waiting("b"), compute=(0.6, 0.6)), pair(waiting("a"), waiting("b"), compute=(0.4, 0.4)))
    ],
    "seconds": [
        (
            pair(waiting("a"), waiting("b"), compute=(0.6, 0.6), seconds=(10.0, 20.0)),
            pair(waiting("a"), waiting("b"), compute=(0.6, 0.6), seconds=(20.0, 10.0)),
        ),
        (
            pair(running("a", *AT_THE_GOAL), suspended("b", *AT_THE_GOAL), compute=(0.6, 0.6), seconds=(10.0, 20.0)),
            pair(running("a", *AT_THE_GOAL), suspended("b", *AT_THE_GOAL), compute=(0.6, 0.6), seconds=(20.0, 10.0)),
        ),
    ],
    "losses": [
        (
            pair(running("a", *FALLING), suspended("b", *STANDING), compute=(0.6, 0.6)),
            pair(running("a", *STANDING), suspended("b", *FALLING), compute=(0.6, 0.6)),
        )
    ],
    "scaling": [(scaled(Scaling()), scaled(Scaling(1.01, max_jobs=2)))],
}
"""What a policy may need -> pairs of jobs that differ in that alone."""


def test_every_policy_has_a_row() -> None:
    assert sorted(NEEDS) == sorted(POLICIES)
    assert sum(len(re.findall(r"`(\w+)`", names)) for names, _, _ in ROWS) == len(POLICIES)
    assert [name for name, need in NEEDS.items() if (need != "nothing") != bool(MISSING[name])] == []


@pytest.mark.parametrize("name", POLICIES)
def test_its_plans_depend_on_what_it_needs_and_on_nothing_else(name: str) -> None:
    if name == "exact":
        pytest.importorskip("scipy")
    policy = POLICIES[name]()
    found = {
        need
        for need, pairs in CHANGES.items()
        for before, after in pairs
        if policy.plan(before, WHERE, 100.0).actions != policy.plan(after, WHERE, 100.0).actions
    }
    always = NEEDS[name].partition(";")[0]
    assert found == set(CHANGES) & set(re.findall(r"\w+", always))
    assert policy.needs_losses is ("losses" in found)
    assert ("scipy" in inspect.getsource(inspect.getmodule(type(policy)))) is ("scipy" in always)  # type: ignore[arg-type]


def test_auto_needs_losses_for_the_objectives_that_its_row_names() -> None:
    named = re.findall(r"`(\w+)`", NEEDS["auto"].partition(";")[2])
    assert sorted(named) == sorted(objective for objective in OBJECTIVES if Auto(objective).needs_losses)
