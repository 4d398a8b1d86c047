"""Large clusters in scenario files: studies by count, failures of nodes by rate, and what arrays ask of a device."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulate_samples import tables

from shoal.core.errors import ScenarioError
from shoal.simulate.scenario import load

CLUSTER = """\
policies = ["wfd"]
checkpoint_every = 60

[[nodes]]
name = "n"
count = 4
kind = "A100"
devices = 2
memory_gb = 80

[[models]]
name = "net"
epoch_seconds = 50.0
compute = 0.5
memory_gb = 3
fused = { 4 = 2.0 }

[[studies]]
name = "grid"
count = 5
learning_rates = 4
epochs = [1, 3, 9]
arrival = { low = 100, high = 200 }
"""

FAILURES = """
[failures]
per_thousand_node_days = 200_000
repair_seconds = 120
days = 0.05
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tables(tmp_path_factory.mktemp("scenarios"))


def scenario_of(folder, text, seed=None):
    path = folder / "cluster.toml"
    path.write_text(text)
    return load(path, folder, seed)


def test_a_count_of_studies_draws_the_epochs_and_the_arrival_of_each(folder):
    scenario = scenario_of(folder, CLUSTER)
    assert [study.name for study in scenario.sources] == [f"grid {number}" for number in range(5)]
    arrivals = [study.arrivals[0] for study in scenario.sources]
    assert len(set(arrivals)) == 5
    assert 100 <= min(arrivals) <= max(arrivals) <= 200
    epochs = {study.settings[1]["epochs"] for study in scenario.sources}
    assert len(epochs) > 1
    assert epochs <= {1, 3, 9}
    assert len(scenario.simulate("wfd").completion) == 20


def test_studies_that_would_have_the_same_name_are_refused(folder):
    twice = CLUSTER + '\n[[studies]]\nname = "grid 3"\nepochs = 1\n'
    with pytest.raises(ScenarioError, match="two studies or jobs are called 'grid 3'"):
        scenario_of(folder, twice)


def test_all_searches_of_a_table_together_are_limited(folder):
    with pytest.raises(ScenarioError, match="5 times 4 trials of 1,000,000 epochs are 20,000,000 epochs in all"):
        scenario_of(folder, CLUSTER.replace("epochs = [1, 3, 9]", "epochs = 1_000_000"))


def test_nodes_fail_at_the_rate_that_is_given_and_are_repaired_before_they_fail_again(folder):
    text = CLUSTER.replace("count = 4", "count = 1000") + FAILURES
    scenario = scenario_of(folder, text.replace("200_000", "6.5").replace("0.05", "100"))
    failures = [event for event in scenario.events if event.failed]
    assert 650 * 0.85 < len(failures) < 650 * 1.15  # 1,000 nodes for 100 days: six standard deviations of 650
    by_node = {}
    for event in scenario.events:
        (node,) = {name.partition("/")[0] for name in (*event.failed, *event.restored)}
        assert len(event.failed) + len(event.restored) == 2  # both devices of the node
        by_node.setdefault(node, []).append((event.at, bool(event.failed)))
    for own in by_node.values():
        assert own == sorted(own)
        assert [failed for _, failed in own] == [True, False] * (len(own) // 2)
        assert all(end - begin == pytest.approx(120) for (begin, _), (end, _) in zip(own[::2], own[1::2], strict=True))


def test_failures_depend_on_the_seed_and_on_nothing_else(folder):
    one, same, other = (scenario_of(folder, CLUSTER + FAILURES, seed).events for seed in (1, 1, 2))
    assert one == same != other


@given(seed=st.integers(0, 10**6), fuse=st.booleans(), policy=st.sampled_from(["fifo", "wfd", "auto"]))
def test_failing_nodes_lose_no_trial_and_no_device_works_longer_than_there_is(folder, seed, fuse, policy):
    scenario = replace(scenario_of(folder, CLUSTER + FAILURES, seed), fuse=fuse)
    found = scenario.simulate(policy)
    assert scenario.events
    assert not found.waiting
    assert len(found.completion) == 20
    assert 0 < found.device_seconds <= 8 * found.makespan + 1e-6


def test_a_failed_node_costs_what_was_not_in_a_checkpoint_and_its_repair(folder):
    calm = scenario_of(folder, CLUSTER.replace("count = 5", "count = 1").replace("[1, 3, 9]", "9"))
    begin, last = calm.sources[0].arrivals[0], calm.simulate("fifo")
    nodes = {f"n{number}": (f"n{number}/0", f"n{number}/1") for number in range(4)}
    event = type(scenario_of(folder, CLUSTER + FAILURES).events[0])
    broken = replace(calm, events=tuple(event(begin + 130, failed=own) for own in nodes.values()))
    repaired = [event(begin + 230, restored=own) for own in nodes.values()]
    found = replace(broken, events=(*broken.events, *repaired)).simulate("fifo")
    assert not found.waiting
    assert 100 < found.makespan - last.makespan < 100 + 60 + 50 + 1  # the repair, and what came after a checkpoint
    assert broken.simulate("fifo").waiting


ARRAYS = CLUSTER.replace("count = 5\n", "").replace("[1, 3, 9]", "2").replace("count = 4\n", "")
ONE_DEVICE = ARRAYS.replace("devices = 2", "devices = 1\noversubscription = 2.0")


@pytest.mark.parametrize("slowdown", ["demands", "shares"])
@pytest.mark.parametrize("wanted", ["", "fused_compute = { 2 = 1.0 }"])
def test_arrays_that_want_a_whole_device_slow_each_other_down(folder, slowdown, wanted):
    text = ONE_DEVICE.replace("fused = { 4 = 2.0 }", f"fused = {{ 4 = 2.0 }}\n{wanted}")
    two = text + '\n[[studies]]\nname = "second"\nlearning_rates = 4\nepochs = 2\narrival = 100\n'
    two = two.replace("{ low = 100, high = 200 }", "100").replace('name = "net"', 'name = "net"\nworkloads = "light/1"')
    scenario = replace(scenario_of(folder, two), slowdown=slowdown)
    found = scenario.simulate("wfd")
    assert [stay.trials for stay in found.intervals] == [4, 4]
    assert found.makespan == pytest.approx((400.0 if wanted else 200.0) + 0.1, abs=0.2)


@pytest.mark.parametrize(
    ("keys", "fault"),
    [
        ("fused_compute = { 1 = 0.5 }", "`fused_compute` must name numbers of members from 2 to 1,000,000, got '1'"),
        ("fused_compute = { 2 = 1.5 }", "from 0 to 1, got 1.5"),
    ],
)
def test_a_wrong_part_of_a_device_is_refused(folder, keys, fault):
    with pytest.raises(ScenarioError, match=fault):
        scenario_of(folder, CLUSTER.replace("fused = {", f"{keys}\nfused = {{"))


@pytest.mark.parametrize(
    "wrong", ["per_thousand_node_days = 0", "repair_seconds = -1", "days = 10_001", "per_thousand_node_days = 1e12"]
)
def test_wrong_failures_are_refused(folder, wrong):
    lines = [wrong if line.startswith(wrong.split(" ")[0]) else line for line in FAILURES.splitlines()]
    with pytest.raises(ScenarioError, match=wrong.split(" ")[0]):
        scenario_of(folder, CLUSTER + "\n".join(lines))
