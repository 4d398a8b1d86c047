"""`shoal run --space ... -- COMMAND` as a user calls it: real programs, real processes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from shoal import api
from shoal.cli.app import app
from shoal.cli.options import best_by_argument
from shoal.cli.space_file import read_space
from shoal.core.domain import Constant
from shoal.core.errors import SpaceError
from shoal.core.space import Space, choice, loguniform, randint, uniform

SPACE = "lr = [0.1, 0.2]\nwidth = 8\n"

LINES = """
import json, os, sys, time
lr, path, fault = float(sys.argv[1]), sys.argv[2] + "/epoch", sys.argv[3]
try:
    epoch = int(open(path).read())
except FileNotFoundError:
    epoch = 0
print("continues after", epoch)
if epoch:
    print(json.dumps({"loss": lr * epoch, "step": epoch}))  # once more: a kill may have come before it was printed
print('{"event": "start", "lr": 0.5}')
print('{"loss": 0.3')
while True:
    epoch += 1
    open(path + ".new", "w").write(str(epoch))
    os.replace(path + ".new", path)  # it may be ended at any moment
    if fault == "status" and lr > 0.15:
        print("what went wrong"); sys.exit(3)
    if fault == "words":
        print(json.dumps({"loss": "low"}))
    else:
        print(json.dumps({"loss": lr * epoch, "step": epoch, "note": "fine"}))
    time.sleep(0.01)
"""

CALLS = """
import sys
import shoal
path = shoal.checkpoint() / "epoch"
epoch = int(path.read_text()) if path.exists() else 0
while True:
    epoch += 1
    path.write_text(str(epoch))
    shoal.report({"loss": float(sys.argv[1]) * epoch}, step=epoch)
"""


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("SHOAL_DEBUG", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "space.toml").write_text(SPACE)
    (tmp_path / "lines.py").write_text(LINES)
    (tmp_path / "calls.py").write_text(CALLS)


Run = Callable[..., subprocess.CompletedProcess[str]]
Trials = Callable[[], list[dict[str, Any]]]


@pytest.fixture
def run(shoal: Run) -> Run:
    def run(command: list[str], *options: str, **settings: str) -> subprocess.CompletedProcess[str]:
        chosen = {"metric": "loss", "mode": "min", "algorithm": "grid", "epochs": "3", "devices": "cpu:2"} | settings
        given = [text for name, value in chosen.items() for text in (f"--{name}", value)]
        line = ["run", "--space", "space.toml", *given, "--directory", "study", *options, "--", *command]
        return shoal(*line, cwd=Path.cwd())

    return run


@pytest.fixture
def trials(shoal: Run) -> Trials:
    def trials() -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(shoal("trials", "study", "--json", cwd=Path.cwd()).stdout)
        return sorted(rows, key=lambda row: row["trial"])

    return trials


def test_a_command_that_prints_lines_of_json(run: Run, trials: Trials) -> None:
    done = run([sys.executable, "lines.py", "{lr}", "{directory}", "none"])
    assert done.returncode == 0, done.stderr
    rows = trials()
    assert [(row["state"], row["epochs"]) for row in rows] == [("complete", 3)] * 2
    assert [row["metrics"]["loss"] for row in rows] == pytest.approx([0.3, 0.6])
    assert all(row["metrics"].keys() == {"loss"} for row in rows)
    logs = "".join(path.read_text() for path in Path("study/logs").glob("job-*.log"))
    assert logs.count("continues after 0") == 2
    assert '{"event": "start", "lr": 0.5}' in logs


def test_a_command_that_is_paused_goes_on_from_what_it_kept(run: Run, trials: Trials) -> None:
    Path("space.toml").write_text("lr = {low = 0.1, high = 0.2}\n")
    command = [sys.executable, "lines.py", "{lr}", "{directory}", "none"]
    done = run(command, "--trials", "3", algorithm="successive_halving")
    assert done.returncode == 0, done.stderr
    assert sorted(row["epochs"] for row in trials()) == [1, 1, 3]
    logs = [path.read_text() for path in Path("study/logs").glob("job-*.log")]
    assert sum("continues after 0" in log for log in logs) == 3
    assert len(logs) == 4


def test_a_command_that_calls_report(run: Run, trials: Trials, shoal: Run) -> None:
    done = run([sys.executable, "calls.py", "{lr}"])
    assert done.returncode == 0, done.stderr
    assert "does not name" not in done.stderr
    assert [row["metrics"]["loss"] for row in trials()] == pytest.approx([0.3, 0.6])
    best = shoal("best", "study", "--json", cwd=Path.cwd())
    checkpoint = Path(json.loads(best.stdout)["checkpoint"])
    assert (checkpoint / "epoch").read_text() == "1"  # its loss rises


def test_without_an_algorithm_one_is_chosen(shoal: Run) -> None:
    options = {"space": "space.toml", "metric": "loss", "mode": "min", "trials": "8", "epochs": "2", "devices": "cpu:2"}
    given = [text for name, value in options.items() for text in (f"--{name}", value)]
    done = shoal("run", *given, "--directory", "study", "--", sys.executable, "calls.py", "{lr}", cwd=Path.cwd())
    assert done.returncode == 0, done.stderr
    assert "Grid(epochs=2) is chosen, as the space has 2 points, and 8 trials try them all" in done.stderr


def test_a_status_other_than_0_shows_the_last_output(run: Run, trials: Trials) -> None:
    done = run([sys.executable, "lines.py", "{lr}", "{directory}", "status"])
    assert done.returncode == 0, done.stderr
    fine, failed = trials()
    assert fine["state"] == "complete"
    assert failed["state"] == "failed"
    assert "the last output of lines:\n" in failed["reason"]
    assert "lines exited with status 3\nLog: " in failed["reason"]
    assert "what went wrong" in failed["reason"]
    assert "study/logs/job-" in failed["reason"]


def test_a_metric_that_is_not_a_number_ends_the_study(run: Run) -> None:
    done = run([sys.executable, "lines.py", "{lr}", "{directory}", "words"])
    assert done.returncode == 1
    assert "the metric 'loss' must be a number, got 'low'" in done.stderr


def test_a_program_that_never_reports(run: Run, trials: Trials) -> None:
    done = run(["sleep", "60"], "--time-limit", "0.5")
    assert done.returncode == 1
    assert "does not name {lr}" in done.stderr
    assert all(row["state"] == "failed" and "sleep has never reported for 0.5 s" in row["reason"] for row in trials())


def test_a_space_is_read_from_a_pipe() -> None:
    ends = os.pipe()
    with open(ends[1], "w") as file:
        file.write("lr = [0.1]")
    assert read_space(Path(f"/dev/fd/{ends[0]}"))[0] == Space({"lr": [0.1]})
    os.close(ends[0])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        pytest.param(
            ["python", "{rl}"], "names {rl}, which is not a parameter; it may name {lr}, {width}, {trial}", id="name"
        ),
        pytest.param(["python", "{lr:.2f}"], "names {lr:.2f}, which is not a parameter", id="format"),
        pytest.param(["pyhton", "{lr}"], "there is no program 'pyhton'", id="program"),
        pytest.param(["./lines.py", "{lr}"], "may not be executed by this user; make it so (chmod +x", id="mode"),
        pytest.param([f"{os.curdir}/", "{lr}"], "the program './' is a directory", id="directory"),
        pytest.param(["python", "{optimizer.momentum}"], "which only some configurations", id="conditional"),
    ],
)
def test_a_command_that_cannot_be_started(run: Run, line: list[str], words: str) -> None:
    if "optimizer" in line[1]:
        Path("space.toml").write_text(
            'optimizer = [{name = "sgd", momentum = {low = 0.0, high = 0.9}}, {name = "adam"}]'
        )
    assert shutil.which("python")
    done = run(line)
    assert done.returncode == 1
    assert words in done.stderr
    assert not Path("study").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        pytest.param(["--space", "space.toml", "--mode", "min", "--", "true"], "is needed with --space", id="metric"),
        pytest.param(["--metric", "loss", "study.py"], "goes with --space only", id="no space"),
        pytest.param(["missing.py"], "does not exist", id="no file"),
        pytest.param([os.devnull], "is a pipe or a device", id="no regular file"),
        pytest.param(["space.toml"], "shoal run --space space.toml", id="a space without its option"),
        pytest.param(
            [*("--space", "space.toml", "--metric", "loss", "--mode", "min", "--epochs", "1"), "--", "true"],
            "is needed without --algorithm",
            id="trials",
        ),
        pytest.param(
            [
                *("--space", "space.toml", "--metric", "loss", "--mode", "min", "--epochs", "9", "--trials", "3"),
                *("--algorithm", "hyperband", "--", "true"),
            ],
            "finds their number by itself",
            id="trials of hyperband",
        ),
        pytest.param(
            ["--space", "space.toml", "--algorithm", "hyperhand", "--", "true"], "is not one of", id="algorithm"
        ),
    ],
)
def test_wrong_usage(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, ["run", *arguments])
    assert done.exit_code == 2
    assert words in " ".join(done.output.replace("│", " ").split())


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("f1", "f1"),
        ("val/loss:min", {"val/loss": "min"}),
        ("a:b:max", {"a:b": "max"}),
        ("a:b", "a:b"),
        (":min", ":min"),
    ],
)
def test_the_metric_of_the_best_epoch_may_have_its_mode(text: str, expected: str | dict[str, str]) -> None:
    assert best_by_argument(text) == expected


def test_a_report_of_a_program_has_the_metric_of_the_best_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(api, "tune", lambda task, space, **arguments: found.append(task.metrics))
    options = ["--metric", "loss", "--mode", "min", "--trials", "1", "--epochs", "2", "--best-by", "val:min"]
    CliRunner().invoke(app, ["run", "--space", "space.toml", *options, "--", "true", "{lr}", "{width}"])
    assert found == [("loss", "val")]


def test_a_program_cannot_be_profiled(shoal: Run, tmp_path: Path) -> None:
    (tmp_path / "study.py").write_text(
        "import shoal\n"
        "shoal.tune(lambda config: None, {'lr': 1}, metric='loss', mode='min', algorithm=shoal.Random(1, 1))\n"
    )
    done = shoal("profile", "study.py", cwd=tmp_path)
    assert done.returncode == 1
    assert "is a program of yours, which cannot be tried for a few steps" in done.stderr


def test_a_file_of_a_space(tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text(
        """
        lr = {low = 1e-4, high = 1e-1, log = true}
        layers = {low = 1, high = 8}
        momentum = {low = 0, high = 0.9}
        width = [64, 128]
        steps = {low = 10, high = 30, step = 10}
        shape = {value = [1, 2]}
        seed = 3
        [optimizer]
        name = "sgd"
        decay = {low = 0.0, high = 1.0}
        """
    )
    assert read_space(tmp_path / "space.toml")[0] == Space(
        {
            "lr": loguniform(1e-4, 1e-1),
            "layers": randint(1, 9),
            "momentum": uniform(0, 0.9),
            "width": choice([64, 128]),
            "steps": choice([10, 20, 30]),
            "shape": Constant([1, 2]),
            "seed": 3,
            "optimizer": {"name": "sgd", "decay": uniform(0.0, 1.0)},
        }
    )


def test_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    (tmp_path / "space.toml").write_text("\N{ZERO WIDTH NO-BREAK SPACE}lr = [0.1, 0.2]\r\n", encoding="utf-8")
    assert read_space(tmp_path / "space.toml")[0] == Space({"lr": [0.1, 0.2]})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("lr = {low = 1e-4}", "`lr`: a range has a number for `low` and for `high`", id="no end"),
        pytest.param("lr = {low = 0.0, high = 1.0, log = true}", r"`lr`: .*0\.0", id="logarithm of 0"),
        pytest.param(
            "lr = 1\na.lr = {low = 1, high = 2, lgo = true}",
            "space.toml:2: `a.lr`: a range has .*'lgo'",
            id="unknown key",
        ),
        pytest.param("lr = {low = 1.0, high = 2.0, log = 1}", "`lr`: `log` must be true or false, got 1", id="log"),
        pytest.param("lr = {low = 1, high = 2, step = 'a'}", "`lr`: `step` must be a number", id="step"),
        pytest.param("width = []", "`width`: a choice must have", id="no option"),
        pytest.param("a.b = [[1], [2]]", r"`a.b`: .*write {value = \[\.\.\.\]} for a list that is a value", id="lists"),
        pytest.param("day = 2026-01-01", "`day`", id="a date"),
        pytest.param("lr = ", "space.toml cannot be read: Invalid value", id="no TOML"),
    ],
)
def test_a_file_that_is_not_a_space(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "space.toml").write_text(text)
    with pytest.raises(SpaceError, match=words):
        read_space(tmp_path / "space.toml")
