"""`shoal history` as a user calls it."""

import json
import sqlite3
from contextlib import closing
from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from typer.testing import CliRunner

from shoal.cli.app import app
from shoal.cli.history import history_table, tasks_table
from shoal.core.demand import Profile
from shoal.plan.cost.history import History, environment, records

DIGEST = "0123456789abcdef" * 2
PROFILE = Profile({1: 0.1, 16: 0.4}, 10, 3, 300_000_000, 12_000_000, 0.5, 1.0, mixing=1.25, crowding={2: 1.5})


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))


@pytest.fixture
def known():
    mine, other = History(environment=environment()), History(environment="torch 1")
    other.put(DIGEST, "d" * 32, 64, "NVIDIA [H200]", PROFILE)
    mine.put(DIGEST, "d" * 32, 32, "NVIDIA [H200]", PROFILE)
    mine.put(DIGEST, "e" * 32, 32, "NVIDIA [H200]", PROFILE)
    mine.put("trial 7", "", 1, "cpu/1", PROFILE)
    return mine.path


def shoal(*arguments):
    return CliRunner().invoke(app, ["history", *arguments])


def test_what_is_known_is_a_table(known):
    done = shoal()
    assert done.exit_code == 0
    lines = [line.split() for line in done.stdout.splitlines()]
    _, _, head, *rows = lines
    assert head[:3] == ["kind", "and", "data"]
    measured = ["1:100,", "16:400", "12", "MB", "300", "MB", "50%", "1", "1.25"]
    assert rows[:6] == [
        ["NVIDIA", "[H200]", "01234567", "32", *measured],
        ["dddddddd"],
        ["NVIDIA", "[H200]", "01234567", "32", *measured],
        ["eeeeeeee"],
        ["cpu/1", "trial", "7", "1", *measured],
        ["*", "NVIDIA", "[H200]", "01234567", "64", *measured],
    ]
    assert " ".join(rows[6]) == "* measured with torch 1: not used now"
    assert done.stdout.splitlines()[-1] == f"in {known}"


def _of_tasks(lines):
    """Lines below the table, without those on shared devices and the structures of which nothing else is said."""
    kept = [line for line in lines if "side by side" not in line]
    ends = [*kept[1:], ""]
    return [line for line, after in zip(kept, ends, strict=True) if line.startswith("  ") or after.startswith("  ")]


def rendered(table):
    """The lines of a table at 80 columns."""
    console = Console(width=80, file=StringIO())
    console.print(table)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("kind", ["cpu/1", "NVIDIA H100 80GB HBM3"])
@pytest.mark.parametrize("others", [False, True], ids=["mine", "and others"])
def test_at_80_columns_no_word_is_broken_and_no_column_missing(tmp_path, kind, others):
    """Of a structure with two data, each of which has its own tasks."""
    mine = History(environment=environment())
    for data, rows in (("d", 512), ("e", 1024)):
        mine.put(DIGEST, data * 32, 32, kind, replace(PROFILE, step_seconds={1: 0.1}))
        mine.put_task(DIGEST, data * 32, 32, "Digits", [{"rows": rows}])
    if others:
        History(environment="torch 1").put(DIGEST, "d" * 32, 64, kind, PROFILE)
    found = sorted(records(mine.path), key=lambda record: record.environment != environment())
    words = " ".join(rendered(history_table(found, environment()))).split()
    for word in ("structure", "process", "compute", "cores", "mixing", "1.25", *kind.split()):
        assert word in words
    assert {"dddddddd", "eeeeeeee"} < set(words)
    lines = [line.rstrip() for line in rendered(tasks_table(found))]
    assert _of_tasks(lines) == [
        "01234567 and dddddddd, batches of 32",
        "  Digits: rows=512",
        f"  {kind}: 1 member measured: more take over half of the memory",
        "01234567 and eeeeeeee, batches of 32",
        "  Digits: rows=1024",
        f"  {kind}: 1 member measured: more take over half of the memory",
    ]


def test_programs_take_no_more_than_80_columns(tmp_path):
    mine = History(environment=environment())
    for name in ("train", "a_function_with_a_long_name"):
        mine.put(f"opaque {name} {DIGEST[:16]}", "", 1, "cpu/1", replace(PROFILE, step_seconds={1: 0.1}, cores=0.012))
    lines = rendered(history_table(records(mine.path), environment()))
    assert [line.split()[0] for line in lines if "0.01" in line] == ["cpu/1", "cpu/1"]
    assert [line.split()[-1] for line in lines if "0.01" in line] == ["1.25", "1.25"]


def test_where_structures_come_from_and_why_one_size_was_measured(known):
    history = History(environment=environment())
    history.put_task(DIGEST, "d" * 32, 32, "Digits", [{"width": 64, "lr": 0.1}, {"width": 64, "lr": 0.2}])
    history.put_task(DIGEST, "d" * 32, 32, "Pa[b]", [{"lr": 0.2}])
    for place, changes in enumerate([{"expected_epochs": 3}, {"measured_members": 1}, {}]):
        history.put(f"{place}" * 32, "", 8, "cpu/1", replace(PROFILE, step_seconds={1: 0.1}, **changes))
    history.put(f"opaque train {DIGEST[:16]}", "", 1, "cpu/1", replace(PROFILE, step_seconds={1: 0.1}))
    _, below = shoal().stdout.split("\n\n")
    lines = [line.rstrip() for line in below.splitlines()[:-1]]
    assert _of_tasks(lines) == [
        "01234567 and dddddddd, batches of 32",
        "  Digits: width=64",
        "  Pa[b]: lr=0.2",
        "00000000, batches of 8",
        "  cpu/1: 1 member measured: only 3 epochs waited",
        "11111111, batches of 8",
        "  cpu/1: 1 member measured: no array had more",
        "22222222, batches of 8",
        "  cpu/1: 1 member measured: more take over half of the memory",
        "opaque train 01234567",
        "  cpu/1: 1 member measured: programs are not fused",
    ]
    first, second, *_ = json.loads(shoal("--json").stdout)["records"]
    assert (first["tasks"], second["tasks"]) == ({"Digits": {"width": 64}, "Pa[b]": {"lr": 0.2}}, {})
    shoal("clear")
    with closing(sqlite3.connect(known)) as connection:
        assert connection.execute("SELECT count(*) FROM tasks").fetchall() == [(0,)]


def test_as_json(known):
    shown = json.loads(shoal("--json").stdout)
    assert (shown["path"], shown["environment"]) == (str(known), environment())
    assert [(each["current"], each["structure"], each["batch_size"]) for each in shown["records"]] == [
        *((True, DIGEST, 32), (True, DIGEST, 32), (True, "trial 7", 1), (False, DIGEST, 64))
    ]
    assert shown["records"][0]["profile"] == {
        "step_seconds": {"1": 0.1, "16": 0.4},
        "member_memory": 12_000_000,
        "base_memory": 300_000_000,
        "compute": 0.5,
        "cores": 1.0,
        "mixing": 1.25,
        "measured_members": 16,
        "expected_epochs": None,
        "share_speeds": {},
        "crowding": {"2": 1.5},
    }


def test_shares_are_shown_and_cleared(known):
    history = History(environment=environment())
    history.put("f" * 32, "", 8, "NVIDIA [H200]", replace(PROFILE, share_speeds={16: {0.5: 0.97, 0.25: 0.6}}))
    lines = [line.rstrip() for line in shoal().stdout.splitlines()]
    below = lines.index("ffffffff, batches of 8") + 1
    assert [line.strip() for line in lines[below : below + 1]] == [
        "NVIDIA [H200]: 60% of its speed on 25% of the device, 97% on 50%; 2 side by side take 1.5x"
    ]
    shown = json.loads(shoal("--json").stdout)
    (profile,) = [each["profile"] for each in shown["records"] if each["structure"] == "f" * 32]
    assert profile["share_speeds"] == {"16": {"0.25": 0.6, "0.5": 0.97}}
    done = shoal("clear", "--kind", "NVIDIA [H200]")
    assert "of structures in one process, from" in done.stderr
    assert not any(each["kind"] == "NVIDIA [H200]" for each in json.loads(shoal("--json").stdout)["records"])


def test_nothing_is_known_yet(tmp_path):
    done = shoal()
    assert (done.exit_code, done.stdout) == (0, f"no measurements yet in {tmp_path / 'history-8.sqlite'}\n")
    assert json.loads(shoal("--json").stdout)["records"] == []


@pytest.mark.parametrize(
    ("options", "removed", "left"),
    [
        pytest.param([], 4, 0, id="all"),
        pytest.param(["--kind", "cpu/1"], 1, 3, id="kind"),
        pytest.param(["--structure", "0123"], 3, 1, id="structure"),
    ],
)
def test_clear_says_how_much_it_removed(known, options, removed, left):
    done = shoal("clear", *options)
    assert (done.exit_code, done.stdout) == (0, "")
    assert f"removed {removed} measurements of structures and 0 of structures in one process" in done.stderr
    assert len(json.loads(shoal("--json").stdout)["records"]) == left


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        (["--kind", "cpu"], "there are no measurements of the kind 'cpu'; measured kinds: 'NVIDIA [H200]', 'cpu/1'"),
        (["--structure", "77"], "there are no measurements of a structure that begins with '77'; see: shoal history"),
    ],
)
def test_what_is_not_known_cannot_be_cleared(known, options, hint):
    done = shoal("clear", *options)
    assert done.exit_code == 1
    assert str(done.exception) == hint
    assert len(json.loads(shoal("--json").stdout)["records"]) == 4
