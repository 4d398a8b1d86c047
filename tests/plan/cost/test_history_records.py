"""The job history as a person looks at it."""

import sqlite3
from contextlib import closing

import pytest

from shoal.core.demand import Profile
from shoal.core.errors import ShoalError
from shoal.plan.cost.history import History, delete_records, records

PROFILE = Profile({1: 0.1, 16: 0.4}, 10, 3, 100, 10, 0.5, 1.0, mixing=1.25)


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "history.sqlite"
    mine, other = History(path, environment="torch 2"), History(path, environment="torch 1")
    for structure, kind in (("abc", "cpu/1"), ("abd", "cpu/1"), ("abc", "H200")):
        mine.put(structure, "data", 32, kind, PROFILE)
    other.put("abc", "data", 32, "cpu/1", PROFILE)
    mine.put_relative_time(("abc x 32", "xyz x 8"), "cpu/1", 0.9)
    mine.put_relative_time(("xyz x 8", "xyz x 16"), "H200", 0.9)
    return path


def test_records_hold_every_field(path):
    assert [(x.environment, x.kind, x.structure, x.batch_size, x.profile) for x in records(path)] == [
        ("torch 1", "cpu/1", "abc", 32, PROFILE),
        ("torch 2", "H200", "abc", 32, PROFILE),
        ("torch 2", "cpu/1", "abc", 32, PROFILE),
        ("torch 2", "cpu/1", "abd", 32, PROFILE),
    ]


@pytest.mark.parametrize("text", ["{", "[]", '{"step_seconds": {}}', "null"])
def test_records_of_another_version_have_no_profile(path, text):
    with closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("UPDATE profiles SET profile = ? WHERE environment = 'torch 1'", (text,))
    assert [record.profile for record in records(path)] == [None, PROFILE, PROFILE, PROFILE]


@pytest.mark.parametrize(
    ("which", "removed", "left"),
    [
        pytest.param({}, (4, 2), 0, id="all"),
        pytest.param({"kind": "cpu/1"}, (3, 1), 1, id="a kind"),
        pytest.param({"structure": "abc"}, (3, 1), 1, id="a structure"),
        pytest.param({"structure": "ab"}, (4, 1), 0, id="structures that begin so"),
        pytest.param({"structure": "xyz"}, (0, 2), 4, id="a structure that only shared a process"),
        pytest.param({"structure": "abc", "kind": "H200"}, (1, 0), 3, id="a structure on a kind"),
        pytest.param({"structure": "%"}, (0, 0), 4, id="no pattern"),
    ],
)
def test_delete_records(path, which, removed, left):
    assert delete_records(path, **which) == removed
    assert len(records(path)) == left


def test_a_missing_file_has_no_records_and_is_not_created(tmp_path):
    path = tmp_path / "nothing.sqlite"
    assert records(path) == []
    assert delete_records(path) == (0, 0)
    assert not path.exists()


def test_a_file_of_something_else_is_named_with_the_remedy(tmp_path):
    path = tmp_path / "history.sqlite"
    path.write_bytes(b"this is not a database" * 100)
    for use in (records, delete_records):
        with pytest.raises(ShoalError, match=r"history\.sqlite cannot be used .*SHOAL_CACHE"):
            use(path)
