import json
import sqlite3
import subprocess
import sys
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from shoal.core.demand import Profile
from shoal.plan.cost.history import History, cache_directory, profile_from

PROFILE = Profile({1: 0.1, 16: 0.4}, 10, 3, 100, 10, 0.5, 1.0)
KEY = ("structure", "data", 32, "cpu/1")


def test_a_second_study_knows_what_the_first_measured(tmp_path):
    path = tmp_path / "cache" / "history.sqlite"
    History(path, environment="torch 1").put(*KEY, PROFILE)
    assert History(path, environment="torch 1").get(*KEY) == PROFILE


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(("other", "data", 32, "cpu/1"), id="structure"),
        pytest.param(("structure", "other", 32, "cpu/1"), id="data"),
        pytest.param(("structure", "data", 64, "cpu/1"), id="batch size"),
        pytest.param(("structure", "data", 32, "cpu/2"), id="kind of device"),
    ],
)
def test_a_profile_belongs_to_its_whole_key(tmp_path, other):
    path = tmp_path / "history.sqlite"
    history = History(path)
    history.put(*KEY, PROFILE)
    assert history.get(*other) is None
    changed = replace(PROFILE, cores=2.0)
    history.put(*other, changed)
    assert History(path).get(*KEY) == PROFILE
    assert History(path).get(*other) == changed


def test_relative_times_belong_to_pairs_on_a_kind_of_device(tmp_path):
    path = tmp_path / "history.sqlite"
    history = History(path, environment="torch 1")
    history.put_relative_time(("a", "b"), "cpu/1", 0.9)
    history.put_relative_time(("a", "c"), "cpu/1", 0.9)
    history.put_relative_time(("a", "b"), "cpu/1", 0.7)
    history.put_relative_time(("a", "a"), "cpu/2", 0.5)
    expected = {("a", "b"): 0.7, ("a", "c"): 0.9}
    for known in (history, History(path, environment="torch 1")):
        assert known.relative_times("cpu/1") == expected
        assert known.relative_times("cpu/2") == {("a", "a"): 0.5}
        assert known.relative_times("H200") == {}
    assert History(path, environment="torch 2").relative_times("cpu/1") == {}


def test_speeds_on_shares_are_kept(tmp_path):
    path = tmp_path / "history.sqlite"
    shares = replace(PROFILE, share_speeds={1: {0.5: 1.0, 0.25: 0.75}, 16: {0.5: 0.75}})
    History(path).put(*KEY, shares)
    assert History(path).get(*KEY) == shares


def test_another_environment_measures_anew(tmp_path):
    path = tmp_path / "history.sqlite"
    History(path, environment="torch 1").put(*KEY, PROFILE)
    assert History(path, environment="torch 2").get(*KEY) is None


def test_a_later_profile_replaces_an_earlier_one(tmp_path):
    history = History(tmp_path / "history.sqlite")
    history.put(*KEY, PROFILE)
    changed = replace(PROFILE, compute=0.9)
    history.put(*KEY, changed)
    assert history.get(*KEY) == changed
    assert History(history.path).get(*KEY) == changed


def not_a_database(path):
    path.write_bytes(b"this is not a database" * 100)


def no_directory(path):
    path.parent.rmdir()
    path.parent.write_text("a file where the directory should be")


@pytest.mark.parametrize("damage", [not_a_database, no_directory])
def test_a_file_that_cannot_be_used_warns_once_and_the_study_goes_on(tmp_path, damage):
    path = tmp_path / "cache" / "history.sqlite"
    path.parent.mkdir()
    damage(path)
    with pytest.warns(RuntimeWarning, match=r"history\.sqlite cannot be used .*SHOAL_CACHE") as warned:
        history = History(path)
    history.put(*KEY, PROFILE)
    assert len(warned) == 1
    assert history.get(*KEY) == PROFILE


@pytest.mark.parametrize("text", ['{"step_seconds": {}, "colour": 1}', "{", '{"step_seconds": 3}', "7"])
def test_a_row_that_cannot_be_read_is_measured_anew_and_the_others_are_kept(tmp_path, text):
    path = tmp_path / "history.sqlite"
    History(path).put(*KEY, PROFILE)
    History(path).put("damaged", *KEY[1:], PROFILE)
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE profiles SET profile = ? WHERE structure = 'damaged'", (text,))
    history = History(path)
    assert (history.get(*KEY), history.get("damaged", *KEY[1:])) == (PROFILE, None)
    history.put("damaged", *KEY[1:], PROFILE)
    assert History(path).get("damaged", *KEY[1:]) == PROFILE


def test_a_file_that_breaks_later_warns_once_and_keeps_the_profiles(tmp_path):
    history = History(tmp_path / "history.sqlite")
    history.put(*KEY, PROFILE)
    not_a_database(history.path)
    with pytest.warns(RuntimeWarning, match="cannot be used") as warned:
        history.put("other", *KEY[1:], PROFILE)
    history.put("third", *KEY[1:], PROFILE)
    assert len(warned) == 1
    assert history.get(*KEY) == history.get("third", *KEY[1:]) == PROFILE


WRITER = """
import sys
from pathlib import Path
from shoal.core.demand import Profile
from shoal.plan.cost.history import History
history = History(Path(sys.argv[1]))
for index in range(40):
    history.put(f"{sys.argv[2]}-{index}", "data", 32, "cpu/1", Profile({1: 0.1}, 10, 3, 100, 10, 0.5, 1.0))
"""


def test_two_studies_write_at_once_and_nothing_is_lost(tmp_path):
    path = tmp_path / "history.sqlite"
    command = [sys.executable, "-W", "error", "-c", WRITER, str(path)]
    writers = [subprocess.Popen([*command, name], stderr=subprocess.PIPE, text=True) for name in ("one", "two")]
    for writer in writers:
        _, errors = writer.communicate(timeout=60)
        assert (writer.returncode, errors) == (0, "")
    history = History(path)
    missing = [
        f"{name}-{index}"
        for name in ("one", "two")
        for index in range(40)
        if history.get(f"{name}-{index}", *KEY[1:]) is None
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("own", "shared", "expected"),
    [
        pytest.param("/own", "/shared", Path("/own"), id="SHOAL_CACHE"),
        pytest.param(None, "/shared", Path("/shared/shoal"), id="XDG_CACHE_HOME"),
        pytest.param("", "", Path.home() / ".cache" / "shoal", id="neither"),
    ],
)
def test_cache_directory(monkeypatch, own, shared, expected):
    for name, value in (("SHOAL_CACHE", own), ("XDG_CACHE_HOME", shared)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    assert cache_directory() == expected


def test_the_default_file_is_in_the_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    History().put(*KEY, PROFILE)
    assert [file.name for file in tmp_path.iterdir()] == ["history-8.sqlite"]


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1.0"])
@pytest.mark.parametrize("amount", ["step_seconds", "compute", "cores", "fetch_seconds", "member_memory"])
def test_a_profile_with_an_impossible_cost_is_none(amount, value):
    """So the trials are measured again, whoever has written it."""
    cost = {1: float(value)} if amount == "step_seconds" else float(value)
    assert profile_from(json.dumps({**asdict(PROFILE), amount: cost})) is None
    with pytest.raises(ValueError, match=f"a profile's {amount} must be finite and not negative, got"):
        replace(PROFILE, **{amount: cost})
