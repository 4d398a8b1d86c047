"""Scenario files: what they come to, and how mistakes in them are told."""

import tomllib
from dataclasses import replace

import pytest
from simulate_samples import GB, REAL, ROOT, needs_data, tables

from shoal.core.errors import ScenarioError
from shoal.simulate.scenario import load

SMALL = """\
policies = ["fifo", "wfd"]
slowdown = "none"

[[nodes]]
name = "a"
count = 2
kind = "A100"
devices = 2
memory_gb = 80
oversubscription = 2.5

[[models]]
name = "net"
batch_sizes = [32, 64]
epoch_seconds = [20.0, 10]
compute = 0.5
memory_gb = [3, 5]
kinds = { A100 = 1.0, H100 = 2.0 }

[[studies]]
name = "grid"
learning_rates = 3
epochs = 2
alpha = 1.5
max_jobs = 2

[[jobs]]
name = "other"
count = 3
seconds = [5, 6]
compute = { low = 0.2, high = 0.4 }
arrival = 7

[[events]]
at = 30
fail = "a0/1"

[[events]]
at = 40
restore = ["a0/1"]
add = [{ name = "h", kind = "H100", devices = 1, memory_gb = 80 }]
"""


def written(folder, text):
    path = folder / "small.toml"
    path.write_text(text)
    return path


def test_what_a_file_says(tmp_path):
    scenario = load(written(tmp_path, SMALL))
    assert [node.name for node in scenario.cluster.nodes] == ["a0", "a1"]
    assert [(device.name, device.capacity) for _, device in scenario.cluster][:2] == [("a0/0", 2.5), ("a0/1", 2.5)]
    search, listed = scenario.sources
    assert [each.name for each in search.structures] == ["grid: net x 32", "grid: net x 64"]
    takes = [each.profiles["A100"] for each in search.structures]
    assert [(each.step_seconds, each.member_memory // GB) for each in takes] == [({1: 20}, 3), ({1: 10}, 5)]
    assert search.structures[0].profiles["H100"].step_seconds == {1: 10}
    assert {(each.alpha, each.profiles["A100"].crowding[2]) for each in search.structures} == {(1.5, 1.5)}
    assert [each.name for each in listed.structures] == ["other/0", "other/1", "other/2"]
    assert listed.arrivals == [7, 7, 7]
    for each in listed.structures:
        assert each.profiles["H100"].step_seconds[1] in (5, 6)
        assert 0.2 <= each.profiles["A100"].compute <= 0.4
    assert [event.at for event in scenario.events] == [30, 40]
    assert (scenario.policies, scenario.objective, scenario.slowdown) == (("fifo", "wfd"), "makespan", "none")
    outcome = scenario.simulate("wfd")
    assert (len(outcome.completion), outcome.waiting) == (9, {})


OTHER_MACHINES = """\
extends = "small.toml"
description = "the same on one H100"

[[nodes]]
name = "a0"
kind = "H100"
devices = 2
memory_gb = 80
"""


def test_a_file_that_extends_another(tmp_path):
    base = load(written(tmp_path, SMALL))
    path = tmp_path / "h100.toml"
    path.write_text(OTHER_MACHINES)
    scenario = load(path)
    assert (scenario.name, scenario.description, scenario.slowdown) == ("h100", "the same on one H100", "none")
    assert [(device.name, device.kind) for _, device in scenario.cluster] == [("a0/0", "H100"), ("a0/1", "H100")]
    assert scenario.sources[0] == base.sources[0]
    assert scenario.events == base.events


EXTENDED = {
    "a mistake in the other": (
        "learning_rates",
        "learning_rate",
        "",
        "small.toml:22: in `studies` there is no key",
    ),
    "a mistake of its own": (
        "",
        "",
        "policy = 1",
        "h100.toml:3: in the file there is no key 'policy' (did you mean 'policies'?)",
    ),
    "another that is not there": (
        "",
        "",
        'extends = "none.toml"',
        "h100.toml:1: {}/none.toml cannot be read: there is no such file",
    ),
    "a folder": ("", "", 'extends = "."', "h100.toml:1: {} cannot be read: Is a directory"),
    "another that extends": (
        "policies =",
        'extends = "a.toml"\npolicies =',
        "",
        "h100.toml:1: {}/small.toml extends a file itself",
    ),
    "itself": ("", "", 'extends = "h100.toml"', "h100.toml:1: {}/h100.toml extends a file itself"),
    "no name": ("", "", "extends = 3", "h100.toml:1: `extends` must be a string without control characters, got 3"),
}


@pytest.mark.parametrize(("old", "new", "own", "message"), EXTENDED.values(), ids=EXTENDED)
def test_a_mistake_is_told_of_the_file_that_has_it(old, new, own, message, tmp_path):
    written(tmp_path, SMALL.replace(old, new, 1))
    path = tmp_path / "h100.toml"
    head, *rest = OTHER_MACHINES.splitlines()
    path.write_text("\n".join([own, *rest] if own.startswith("extends") else [head, rest[0], own, *rest[1:]]))
    with pytest.raises(ScenarioError) as caught:
        load(path)
    assert message.format(tmp_path) in str(caught.value)


def test_the_seed_decides_what_is_drawn(tmp_path):
    path = written(tmp_path, SMALL)
    assert load(path).sources == load(path).sources == load(path, seed=0).sources
    assert load(path).sources != load(path, seed=1).sources


WRONG = {
    "unknown key at the top": (
        "slowdown =",
        "slow_down =",
        2,
        "there is no key 'slow_down' (did you mean 'slowdown'?)",
    ),
    "unknown key of the second event": (
        "restore = [",
        "restor = [",
        40,
        "in `events` there is no key 'restor' (did you mean 'restore'?)",
    ),
    "unknown key in an inline table": ("high = 0.4", "hihg = 0.4", 31, "there is no key 'hihg' (did you mean 'high'?)"),
    "unknown key of a node within an event": (
        '"h", kind',
        '"h", knid',
        41,
        "in `add` there is no key 'knid' (did you mean 'kind'?)",
    ),
    "unknown table": ("[[jobs]]", "[[job]]", 27, "there is no key 'job' (did you mean 'jobs'?)"),
    "a value of another type": (
        "epochs = 2",
        'epochs = "two"',
        23,
        "`epochs` must be an integer from 1 to 1,000,000, got 'two'",
    ),
    "a missing key": ('kind = "A100"\n', "", 4, "`kind` is missing in `nodes`"),
    "neither a grid nor an algorithm": ("epochs = 2\n", "", 20, "give either `epochs`, for a grid, or `algorithm"),
    "a negative amount": (
        "memory_gb = [3, 5]",
        "memory_gb = [3, -5]",
        17,
        "`memory_gb` must be a number from 0 to 1,000,000,000,000, got -5",
    ),
    "too many amounts": (
        "[20.0, 10]",
        "[1, 2, 3]",
        15,
        "`epoch_seconds` must be one, or 2, one for each batch size, got 3",
    ),
    "a negative draw": ("seconds = [5, 6]", "seconds = -5", 30, "`seconds` must be a number from 0 to"),
    "nothing to draw from": ("seconds = [5, 6]", "seconds = []", 30, "or a list of such, got []"),
    "no number": ("= 2.5", "= nan", 10, "`oversubscription` must be a number from 1e-06 to"),
    "true for a number": ("count = 3", "count = true", 29, "`count` must be an integer from 1 to 1,000,000, got True"),
    "a negative ratio": (
        "= 2.5",
        "= -1",
        10,
        "`oversubscription` must be a number from 1e-06 to 1,000,000,000,000, got -1",
    ),
    "an unknown policy": ('"wfd"', '"wdf"', 1, "got 'wdf' (did you mean 'wf'?)"),
    "an unknown model": ("learning_rates", 'models = "nett"\nlearning_rates', 22, "there is no model 'nett'"),
    "an unknown slow-down": (
        '"none"',
        '"nome"',
        2,
        "`slowdown` must be 'none' or 'demands' or 'shares', got 'nome' (did you mean 'none'?)",
    ),
    "an unknown algorithm": (
        "epochs = 2",
        'algorithm = { name = "hyperbend" }',
        23,
        "'hyperbend' (did you mean 'hyperband'?)",
    ),
    "a setting that an algorithm lacks": (
        "epochs = 2",
        'algorithm = { name = "random", n = 3, epoch = 2 }',
        23,
        "there is no setting 'epoch' (did you mean 'epochs'?)",
    ),
    "an algorithm that cannot be made": (
        "epochs = 2",
        'algorithm = { name = "random", n = 3 }',
        23,
        "algorithm 'random' cannot be made",
    ),
    "two nodes of a name": (
        "[[models]]",
        '[[nodes]]\nname = "a1"\nkind = "A100"\ndevices = 1\nmemory_gb = 8\n[[models]]',
        13,
        "there is or was a node or device 'a1'",
    ),
    "an added node of a name that is there": ('"h", kind', '"a1", kind', 41, "there is or was a node or device 'a1'"),
    "two models of a name": (
        "[[studies]]",
        '[[models]]\nname = "net"\nepoch_seconds = 1\ncompute = 1\nmemory_gb = 1\n[[studies]]',
        21,
        "there is another 'net'; each needs a name of its own",
    ),
    "two studies of a name": (
        "[[jobs]]",
        '[[studies]]\nname = "grid"\nepochs = 1\n[[jobs]]',
        28,
        "there is another 'grid'",
    ),
    "a number beyond all measure": ("= 2.5", "= 1e300", 10, "`oversubscription` must be a number from 1e-06 to"),
    "an event of a node that is not there": (
        'fail = "a0/1"',
        'fail = "a7"',
        36,
        "at 30 s there is no node or device 'a7'; there are a0, a0/0",
    ),
    "more devices than there can be": (
        "devices = 2",
        "devices = 100_000_000_000",
        8,
        "`devices` must be an integer from 1 to 100, got",
    ),
    "more epochs than there can be": (
        "epochs = 2",
        "epochs = 2_000_000",
        23,
        "`epochs` must be an integer from 1 to 1,000,000, got 2000000",
    ),
    "more trials than there can be": (
        "epochs = 2",
        'algorithm = { name = "random", n = 1_000_000_000 }',
        23,
        "`n` must be an integer from 0 to 1,000,000",
    ),
    "more epochs in all than there can be": (
        "learning_rates = 3\nepochs = 2",
        "learning_rates = 100_000\nepochs = 1000",
        22,
        "200,000 trials of 1,000 epochs are 200,000,000 epochs in all; at most 10,000,000 can be simulated",
    ),
    "no algorithm": ("epochs = 2", "algorithm = { n = 3 }", 23, "`name` is missing in `algorithm`"),
    "an event in which nothing happens": ('fail = "a0/1"\n', "", 35, "nothing happens"),
    "a model named twice": (
        "learning_rates",
        'models = ["net", "net"]\nlearning_rates',
        22,
        "a study needs a model, and each once, got net, net",
    ),
    "a speed of next to nothing": ("H100 = 2.0", "H100 = 1e-320", 18, "`H100` must be a number from 1e-06 to"),
    "a checkpoint every moment": (
        '"none"',
        '"none"\ncheckpoint_every = 1e-320',
        3,
        "`checkpoint_every` must be a number from 0.001 to",
    ),
    "members of no array": ("compute = 0.5", "compute = 0.5\nfused = { 1 = 1.0 }", 17, "from 2 to 1,000,000, got '1'"),
    "an unknown packing": ('"none"', '"none"\npacking = "costs"', 3, "got 'costs' (did you mean 'cost'?)"),
    "a name that moves the cursor": (
        'name = "net"',
        'name = "n\\u001b[31m"',
        13,
        "`name` must be a string without control characters",
    ),
    "a node called as a device is": (
        "[[models]]",
        '[[nodes]]\nname = "a0/0"\nkind = "A100"\ndevices = 1\nmemory_gb = 8\n[[models]]',
        13,
        "there is or was a node or device 'a0/0'",
    ),
    "good trials of an unknown number": (
        "epochs = 2",
        "epochs = 2\ncurves = { start = 2.0, floor = 1.0 }",
        24,
        "in `curves` there is no key 'start'; there are task, good",
    ),
}


@pytest.mark.parametrize(("old", "new", "line", "message"), WRONG.values(), ids=WRONG)
def test_a_mistake_is_told_with_its_line(old, new, line, message, tmp_path):
    assert old in SMALL
    path = written(tmp_path, SMALL.replace(old, new, 1))
    with pytest.raises(ScenarioError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert message in str(caught.value)


EMPTY = {
    "no work": ('[[nodes]]\nkind = "A100"\ndevices = 1\nmemory_gb = 8\n', "small.toml:1: there is nothing to do"),
    "no nodes": ("[[jobs]]\nseconds = 1\n", "small.toml:1: `nodes` is missing in the file"),
    "no TOML": ("nodes = [", "cannot be read"),
    "an integer of many digits": ("a = 0x" + "f" * 5000, "cannot be read: Exceeds the limit"),
    "nested too deep": ("a = " + "[" * 5000, "cannot be read"),
    "no model": (
        '[[nodes]]\nkind = "A100"\ndevices = 1\nmemory_gb = 8\n[[studies]]\nepochs = 1\n', "a study needs a model"
    ),
}  # fmt: skip


@pytest.mark.parametrize(("text", "message"), EMPTY.values(), ids=EMPTY)
def test_a_file_that_lacks_something(text, message, tmp_path):
    with pytest.raises(ScenarioError, match=message):
        load(written(tmp_path, text))
    with pytest.raises(ScenarioError, match="cannot be read"):
        load(tmp_path / "missing.toml")


def test_a_model_of_the_table(tmp_path):
    model = """
[[nodes]]
kind = "A100"
devices = 1
memory_gb = 80

[[models]]
name = "net"
batch_sizes = [10]
workloads = ["heavy/1"]
samples = 100

[[studies]]
epochs = 3
"""
    (net,) = load(written(tmp_path, model), tables(tmp_path)).sources[0].structures
    takes = net.profiles["A100"]
    assert (takes.step_seconds[1], takes.compute, takes.member_memory) == (pytest.approx(10 * 0.1), 1.0, 1000 * 2**20)
    assert net.workload == "heavy/1"
    with pytest.raises(ScenarioError, match="there is no workload 'havy/1'"):
        load(written(tmp_path, model.replace("heavy", "havy")), tmp_path)


CORES = """
packing = "none"
[[nodes]]
kind = "A100"
devices = 4
memory_gb = 80
cores = 8
[[jobs]]
count = 4
seconds = 10
start_seconds = 0
cores = {cores}
"""


@pytest.mark.parametrize(("cores", "ends"), [(2, [10] * 4), (4, [10, 10, 20, 20]), (12, [])])
def test_the_cores_of_a_node_are_a_limit(cores, ends, tmp_path):
    outcome = load(written(tmp_path, CORES.format(cores=cores))).simulate("wfd")
    assert sorted(outcome.completion.values()) == pytest.approx(ends)
    assert all("12 CPU cores" in reason for reason in outcome.waiting.values())


def test_who_comes_first_is_served_first(tmp_path):
    text = CORES.format(cores=1).replace("devices = 4", "devices = 1").replace("count = 4", "count = 2\narrival = 5")
    outcome = load(written(tmp_path, f'{text}[[jobs]]\nname = "early"\ncount = 3\nseconds = 10\n')).simulate("fifo")
    assert [name.split("/")[0] for name in outcome.completion] == ["early", "early", "early", "job0", "job0"]


def test_what_takes_no_time_has_figures(tmp_path):
    outcome = load(written(tmp_path, CORES.format(cores=1).replace("seconds = 10", "seconds = 0"))).simulate("fifo")
    assert (outcome.makespan, outcome.device_seconds, outcome.mean_occupancy) == (0, 0, 0)


SCENARIOS = sorted((ROOT / "scenarios").glob("*.toml"))
LARGE = ("large", "gavel_1k", "gavel_10k", "alibaba_1k", "alibaba_10k")  # benchmarks/simulated.py and growth.py
LONG = ("mixed_day", "sp4", "sp4_4", "sp4_8", "sp4_h100", "sp4_mixed")


@needs_data
@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=[pytest.mark.thorough] * (path.stem in LONG))
        for path in SCENARIOS
        if path.stem not in LARGE
    ],
)
def test_every_scenario_runs_to_its_end(path):
    outcome = load(path, REAL).simulate("fifo")
    assert outcome.completion
    assert not outcome.waiting
    assert 0 < outcome.mean_occupancy <= 1


@needs_data
@pytest.mark.parametrize("name", ["sp3", "fluid_halving", pytest.param("hermes_type2", marks=pytest.mark.thorough)])
def test_a_scenario_has_one_outcome(name):
    scenario = load(ROOT / "scenarios" / f"{name}.toml", REAL)
    assert scenario.simulate("auto") == scenario.simulate("auto")


def test_fusion_pays_in_the_scenario_that_shows_it():
    scenario = load(ROOT / "scenarios/fused.toml")
    alone, fused = (each.simulate("fifo") for each in (replace(scenario, fuse=False), scenario))
    assert alone.makespan > 4 * fused.makespan
    assert {stay.trials for stay in fused.intervals} == {8}, "arrays of eight"


def test_the_large_one_says_what_it_promises():
    content = tomllib.loads((ROOT / "scenarios/large.toml").read_text())
    assert content["jobs"][0]["count"] == 100_000
    assert content["nodes"][0]["count"] * content["nodes"][0]["devices"] == 10_000


@pytest.mark.parametrize("name", ["gavel", "alibaba"])
def test_the_mixes_have_ten_times_the_work_on_ten_times_the_devices(name):
    scenarios = [load(ROOT / f"scenarios/{name}_{size}.toml") for size in ("1k", "10k")]
    devices = [sum(1 for _ in each.cluster) for each in scenarios]
    assert devices == [1000, 10_000]
    trials = [sum(len(x.structures) * getattr(x, "learning_rates", 1) for x in each.sources) for each in scenarios]
    assert trials[1] == 10 * trials[0] > devices[1]


@needs_data
def test_more_good_trials_than_there_are(tmp_path):
    text = (ROOT / "scenarios/hermes_type1.toml").read_text()
    path = written(tmp_path, text.replace("n = 16", "n = 900").replace("good = 4", "good = 900"))
    with pytest.raises(
        ScenarioError, match=r"`good` is 900, of 900 trials; \d+ curves reach the target and \d+ do not"
    ):
        load(path, REAL)


ON_SOME = """
[[nodes]]
name = "slow"
kind = "A100"
devices = 1
memory_gb = 80

[[nodes]]
name = "fast"
kind = "H100"
devices = 1
memory_gb = 80

[[jobs]]
count = 2
seconds = 10
compute = 0.4
kinds = "H100"
"""


@pytest.mark.parametrize("measured", ["true", "false"])
def test_jobs_run_on_their_kinds_of_devices_only(measured, tmp_path):
    text = f"measured = {measured}\n{ON_SOME}"
    outcome = load(written(tmp_path, text)).simulate("fifo")
    assert [stay.device for stay in outcome.intervals] == ["fast/0", "fast/0"]
    with pytest.raises(ScenarioError, match=r"small.toml:19: no device is one of V100; the devices are A100, H100"):
        load(written(tmp_path, text.replace('kinds = "H100"', 'kinds = "V100"')))
