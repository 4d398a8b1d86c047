"""Models of scenarios that are taken from the job history."""

import pytest

from shoal.core.demand import Demand, Profile
from shoal.core.errors import ScenarioError
from shoal.cost.estimate import seconds
from shoal.cost.history import History, environment
from shoal.simulate.scenario import load

PROFILE = Profile({1: 0.01, 8: 0.02}, 100, 0, 800, 100, 0.8, 2.0)

SCENARIO = """
slowdown = "demands"

[[nodes]]
kind = "{kind}"
devices = 1
memory_gb = 80

[[models]]
name = "mine"
profile = "{profile}"
members = {members}
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


def loaded(tmp_path, profile="aab", members=1, kind="A100", more=""):
    path = tmp_path / "mine.toml"
    path.write_text(SCENARIO.format(profile=profile, members=members, kind=kind, more=more))
    return load(path)


def test_a_trial_takes_what_was_measured(tmp_path):
    (search,) = loaded(tmp_path).searches
    assert [structure.batch_size for structure in search.structures] == [32, 64]
    assert search.structures[0].demand == {"A100": Demand(0.8, 900, 2.0, 1.0)}


def test_a_member_takes_its_part_of_an_array(tmp_path):
    (search,) = loaded(tmp_path, members=8).searches
    assert search.structures[0].demand == {"A100": Demand(0.1, 200, 0.25, seconds(PROFILE, [1] * 8))}


def test_as_many_trials_as_an_array_has_members_take_its_time(tmp_path):
    scenario = loaded(tmp_path, "ff/11", members=8)
    assert scenario.simulate("wfd").makespan == pytest.approx(seconds(PROFILE, [1] * 8))


def test_a_kind_that_was_not_measured_is_as_fast_as_the_file_says(tmp_path):
    (search,) = loaded(tmp_path, kind="H100", more="kinds = { H100 = 2.0 }").searches
    assert search.structures[0].demand == {"H100": Demand(0.8, 900, 2.0, 0.5)}
    with pytest.raises(ScenarioError, match="it was measured on A100, the devices are H100; say how fast they are"):
        loaded(tmp_path, kind="H100")


@pytest.mark.parametrize(
    ("profile", "words"),
    [
        ("?", r"mine.toml:11: there is no profile '\?'; .*\n  aabbccdd/11223344: batch size 32 on A100, 10 ms a step"),
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
