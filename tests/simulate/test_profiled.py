"""Models of scenarios that are taken from the job history."""

from dataclasses import replace

import pytest

from shoal.core.demand import Profile
from shoal.core.errors import ScenarioError
from shoal.plan.cost.cost import Cost
from shoal.plan.cost.history import History, environment
from shoal.simulate.scenario import load

PROFILE = Profile({1: 0.01, 8: 0.02}, 100, 0, 800, 100, 0.8, 2.0)

SCENARIO = """
slowdown = "demands"
packing = "none"

[[nodes]]
kind = "{kind}"
devices = 1
memory_gb = 80

[[models]]
name = "mine"
profile = "{profile}"
{more}

[[studies]]
learning_rates = 8
epochs = 1
"""


@pytest.fixture(autouse=True)
def history(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    found = History(environment=environment())
    found.put("aabbccddee", "1122334455", 32, "A100", PROFILE)
    found.put("aabbccddee", "1122334455", 64, "A100", PROFILE)
    found.put("ffbbccddee", "1122334455", 32, "A100", PROFILE)
    found.put("ffbbccddee", "3322334455", 32, "A100", PROFILE)


def loaded(tmp_path, profile="aab", kind="A100", more=""):
    path = tmp_path / "mine.toml"
    path.write_text(SCENARIO.format(profile=profile, kind=kind, more=more))
    return load(path)


def test_trials_take_what_was_measured(tmp_path):
    (search,) = loaded(tmp_path).sources
    assert [structure.name for structure in search.structures] == ["study0: mine x 32", "study0: mine x 64"]
    assert search.structures[0].profiles == {"A100": PROFILE}


def test_they_are_fused_as_a_live_study_would(tmp_path):
    scenario = loaded(tmp_path, "ff/11")
    alone, fused = replace(scenario, fuse=False).simulate("fifo"), scenario.simulate("fifo")
    assert fused.makespan == pytest.approx(0.1 + Cost(PROFILE).seconds([1] * 8))
    assert alone.makespan == pytest.approx(8 * (0.1 + Cost(PROFILE).seconds([1])))
    assert [stay.trials for stay in fused.intervals] == [8]


def test_a_kind_that_was_not_measured_is_as_fast_as_the_file_says(tmp_path):
    (search,) = loaded(tmp_path, kind="H100", more="kinds = { H100 = 2.0 }").sources
    assert search.structures[0].profiles["H100"] == replace(PROFILE, step_seconds={1: 0.005, 8: 0.01})
    with pytest.raises(ScenarioError, match="it was measured on A100, the devices are H100; say how fast they are"):
        loaded(tmp_path, kind="H100")


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ("?", r"mine.toml:12: there is no profile '\?'; .*\n  aabbccdd/11223344: batch size 32 on A100, 10 ms a step"),
        ("ff", r"2 profiles begin with 'ff'.*\n  ffbbccdd/11223344.*\n  ffbbccdd/33223344"),
        ("ff/44", "there is no profile 'ff/44'"),
    ],
)
def test_an_unclear_name_is_answered_with_those_that_there_are(profile, words, tmp_path):
    with pytest.raises(ScenarioError, match=words):
        loaded(tmp_path, profile)


def test_an_empty_history(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "nothing"))
    with pytest.raises(ScenarioError, match="the job history of this environment has none"):
        loaded(tmp_path)
