"""The commands as a user calls them: processes with real files, real signals and exit statuses."""

import json
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from support.recorded import RecordedJournal
from typer.testing import CliRunner

from shoal.cli.app import app
from shoal.core.errors import ShoalError
from shoal.core.space import Space, choice, loguniform, uniform
from shoal.core.trial import Budget, Report, Trial, TrialGroup, TrialState
from shoal.journal.view import JournalView
from shoal.spec import StudySpec

SHOAL = [sys.executable, "-c", "from shoal.__main__ import main; main()"]

STUDY = """
import os
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import shoal


class Line(shoal.Task):
    def data(self, config):
        x = torch.linspace(-1, 1, 64, dtype=torch.float64).view(-1, 1)
        return TensorDataset(x, 3 * x + 1), TensorDataset(x, 3 * x + 1)

    def model(self, config):
        return nn.Linear(1, 1).double()

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    def loss(self, model, batch):
        {loss}


if __name__ == "__main__":
    print("arguments:", sys.argv[1:])
    study = shoal.tune(
        Line(), {space}, metric="valid_loss", mode="min", algorithm=shoal.Random(4, epochs={epochs}), devices="cpu:1"
    )
    print("done")
"""
DEFAULTS = {
    "loss": "return F.mse_loss(model(batch[0]), batch[1])",
    "space": '{"lr": shoal.loguniform(1e-3, 1e-1)}',
    "epochs": "3",
}


@pytest.fixture(autouse=True)
def surroundings(tmp_path_factory, monkeypatch):
    """A job history of these tests' own, and one thread for models this small."""
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("SHOAL_DEBUG", raising=False)


def script(directory, **changes):
    text = STUDY
    for name, value in (DEFAULTS | changes).items():
        text = text.replace(f"{{{name}}}", value)
    return written(directory, text)


def written(directory, text):
    path = directory / "study.py"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def ended(shoal, tmp_path_factory):
    """A study that was run with `--json`: the process and the study's directory."""
    place = tmp_path_factory.mktemp("ended")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHOAL_CACHE", str(place / "cache"))
        options = ["--directory", "one study", "--backend", "inline", "--seed", "7", "--json"]
        done = shoal("run", script(place), "first", *options, "--", "--lr", "0.1", cwd=place)
    assert done.returncode == 0, done.stderr
    return done, place / "one study"


@pytest.mark.parametrize("command", ["run", "resume", "status", "report", "trials", "best", "history", "policy"])
def test_every_command_explains_itself(command):
    result = CliRunner().invoke(app, [command, "--help"])
    assert result.exit_code == 0
    assert "--json" in result.stdout


def test_help_lists_the_commands_and_version_is_a_line():
    listing = CliRunner().invoke(app, ["--help"]).stdout
    assert all(f" {command} " in listing for command in ("run", "resume", "status", "report", "trials", "history"))
    assert CliRunner().invoke(app, ["--version"]).stdout == "shoal 0.1.0\n"


def test_the_command_line_runs_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "shoal", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "shoal 0.1.0\n")


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        pytest.param("shoal s", ["simulate", "status", "study"], id="commands"),
        pytest.param("shoal run --policy w", ["water_filling", "wf", "wfd"], id="names of an option"),
        pytest.param("shoal run --tracker m", ["mlflow"], id="names of a repeatable option"),
        pytest.param("shoal policy DIR fi", ["fifo"], id="names of an argument"),
    ],
)
def test_a_shell_completes_commands_and_names(shoal, line, completions, tmp_path, monkeypatch):
    asked = {"_SHOAL_COMPLETE": "complete_bash", "COMP_WORDS": line, "COMP_CWORD": str(line.count(" "))}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    assert sorted(shoal(cwd=tmp_path).stdout.split()) == completions


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        pytest.param(["dance"], "dance", id="unknown command"),
        pytest.param(["run"], "FILE", id="no file"),
        pytest.param(["run", "missing.py"], "missing.py", id="file does not exist"),
        pytest.param(["run", "."], "directory", id="file is a directory"),
        pytest.param(["run", __file__, "--lr", "1"], "--lr", id="option that is not ours"),
        pytest.param(["run", __file__, "--policy", "wdf"], "wfd", id="unknown policy"),
        pytest.param(["run", __file__, "--oversubscription", "half"], "--oversubscription", id="ratio of no number"),
        pytest.param(["resume", ".", "--backend", "pbs"], "local", id="unknown back end"),
        pytest.param(["run", __file__, "--seed", "x"], "--seed", id="seed is not a number"),
        pytest.param(["status", "missing"], "missing", id="directory does not exist"),
        pytest.param(["trials", ".", "--limit", "0"], "--limit", id="limit of none"),
    ],
)
def test_wrong_usage_is_status_2(arguments, hint):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert hint in result.stderr


@pytest.mark.parametrize("command", ["resume", "status", "report", "trials", "best"])
def test_a_directory_without_a_study_is_one_line(shoal, command, tmp_path):
    done = shoal(command, tmp_path, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert str(tmp_path) in done.stderr
    assert done.stderr.count("\n") == 1


TOY = """
slowdown = "none"
policies = ["fifo", "wfd"]

[[nodes]]
kind = "A100"
devices = 1
memory_gb = 80

[[jobs]]
count = 4
seconds = 60
compute = 0.5
"""


@pytest.fixture
def toy(tmp_path):
    (tmp_path / "toy.toml").write_text(TOY)
    return tmp_path


def test_simulate_compares_the_policies_of_the_file(shoal, toy):
    done = shoal("simulate", "toy.toml", cwd=toy)
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[:2] for line in done.stdout.splitlines()[2:]] == [["fifo", "4:00"], ["wfd", "2:00"]]


def test_simulate_prints_json_and_writes_the_page_of_each_policy(shoal, toy):
    done = shoal("simulate", "toy.toml", "--json", "--html", "toy.html", cwd=toy)
    told = json.loads(done.stdout)
    assert [each["policy"] for each in told] == ["fifo", "wfd"]
    assert told[1]["makespan"] == pytest.approx(120 + 2 * 0.1)
    assert done.stderr == "shoal: written: toy-fifo.html\nshoal: written: toy-wfd.html\n"
    page = (toy / "toy-wfd.html").read_text()
    (data,) = re.findall(r'<script type="application/json" id="frozen">(.*?)</script>', page, re.DOTALL)
    shown = json.loads(data)
    assert shown["state"]["study"] == "toy, wfd"
    assert shown["overview"]["total"] == pytest.approx(told[1]["makespan"])
    trained = [bar for bar in shown["overview"]["bars"] if bar["purpose"] == "train"]
    assert [(bar["lanes"], bar["outcome"]) for bar in trained] == [(2, "finished")] * 4
    assert shown["overview"]["devices"][0]["busy"] == pytest.approx(1.0)
    assert set(shown["curves"]) == {"loss"}


def test_simulate_ends_with_status_1_where_jobs_do_not_end(shoal, toy):
    (toy / "toy.toml").write_text(TOY + "memory_gb = 90\n")
    done = shoal("simulate", "toy.toml", "--policy", "fifo", cwd=toy)
    assert done.returncode == 1
    assert done.stderr == (
        "shoal: fifo: 4 jobs still waiting at the end, such as job0/0: can never run here: needs 90.0 GB, the largest "
        "device node0/0 has 80.0 GB\n"
    )


@pytest.mark.parametrize(
    ("arguments", "text", "status", "hint"),
    [
        pytest.param([], "devises = 1", 1, "there is no key 'devises'", id="unknown key"),
        pytest.param(["--policy", "wdf"], "", 2, "'wdf' is not one of", id="unknown policy"),
        pytest.param(["--html", "chart.txt"], "", 1, "whose name ends in .html", id="no page"),
        pytest.param(["--html", "no/page.html"], "", 1, "no is not a directory", id="no folder"),
    ],
)
def test_simulate_in_vain(shoal, toy, arguments, text, status, hint):
    (toy / "toy.toml").write_text(TOY + text + "\n")
    done = shoal("simulate", "toy.toml", *arguments, cwd=toy)
    assert done.returncode == status
    assert hint in done.stderr
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback(shoal, tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_DEBUG", "1")
    assert "Traceback" in shoal("status", tmp_path, cwd=tmp_path).stderr


def test_run_ends_with_the_study_as_json(ended):
    done, directory = ended
    study = json.loads(done.stdout)
    assert (Path(study["directory"]), study["finished"], study["metric"]) == (Path(directory.name), True, "valid_loss")
    assert study["trials"]["complete"] == 4
    assert study["best"]["value"] > 0
    assert study["elapsed"] > 0


def test_a_script_prints_to_standard_error_when_a_program_reads(ended):
    done, _ = ended
    assert done.stderr == "arguments: ['first', '--lr', '0.1']\ndone\n"


def test_options_count_instead_of_the_script_s(ended):
    _, directory = ended
    with JournalView.read(directory) as journal:
        assert (journal.spec.seed, journal.spec.backend, journal.spec.devices) == (7, "inline", "cpu:1")


def test_status_of_an_ended_study(shoal, ended):
    _, directory = ended
    shown = shoal("status", directory, cwd=directory)
    assert shown.returncode == 0
    assert "4 complete" in shown.stdout
    assert "12 of 12" in shown.stdout
    assert shown.stderr == ""
    study = json.loads(shoal("status", directory, "--json", cwd=directory).stdout)
    assert (study["pid"], study["epochs_done"], study["directory"]) == (None, 12, str(directory))


def test_status_of_an_ended_study_draws_the_one_parameter_there_is(shoal, ended):
    _, directory = ended
    lines = shoal("status", directory, cwd=directory).stdout.splitlines()
    assert lines[lines.index("") + 1].rstrip() == "best valid_loss, lower is better: lr across"
    assert lines[-1] == "✓ complete"
    study = json.loads(shoal("status", directory, "--json", cwd=directory).stdout)
    (axis,) = study["grid"]["axes"]
    assert (axis["name"], axis["edges"][0], axis["edges"][-1], len(axis["labels"])) == ("lr", 1e-3, 1e-1, 6)
    assert sum(cell["trials"]["complete"] for cell in study["grid"]["cells"]) == 4
    assert min(cell["best"] for cell in study["grid"]["cells"]) == study["best"]["value"]


SPACE = {
    "lr": loguniform(1e-4, 1e-1),
    "width": choice([64, 128]),
    "optimizer": choice([{"name": "sgd", "momentum": uniform(0, 0.9)}, {"name": "adam"}]),
    "epochs": 9,
}


@pytest.fixture
def begun(tmp_path):
    """Makes a study of so many trials that have reported nothing, in the directory "begun"."""

    def begin(count, parameters=SPACE):
        space = Space(parameters)
        spec = StudySpec(metric="accuracy", mode="max", space=space.to_json())
        with RecordedJournal.create(tmp_path / "begun", spec, task=b"", algorithm=b"") as journal:
            if count:
                trials = tuple(Trial(number, space.sample(number), number, 0) for number in range(count))
                journal.record_proposal(count, [TrialGroup(trials, Budget(9))])
                journal.record_waiting_reasons({number: f"reason {number % 2}" for number in range(count)})
        return tmp_path / "begun"

    return begin


@pytest.mark.parametrize(
    ("parameters", "axes", "hint"),
    [
        pytest.param(SPACE, "lr,depth", "'depth'; it has lr, width, optimizer.name, optimizer.momentum", id="unknown"),
        pytest.param(SPACE, "epochs", "'epochs'; it has lr", id="constant"),
        pytest.param(SPACE, "width, width", "'width' is named twice; the grid has lr, width", id="twice"),
        pytest.param(SPACE, "lr,width,optimizer.name", "names 3 axes", id="three"),
        pytest.param(SPACE, "", "no axis ''", id="empty"),
        pytest.param({"epochs": 9}, "lr", "nothing is searched", id="nothing is searched"),
    ],
)
def test_axes_that_cannot_be_had_are_wrong_usage(begun, parameters, axes, hint):
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["status", str(begun(1, parameters)), "--axes", axes])
    assert result.exit_code == 2
    assert hint in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("count", "parameters", "options", "lines"),
    [
        pytest.param(
            3, SPACE, ["--axes", "width, optimizer.name"],
            ["best accuracy, higher is better: width down, optimizer.name across", "width  sgd  adam",
             "64     1…     1…", "128    1…   ·", "… waiting"],
            id="two axes",
        ),
        pytest.param(
            3, SPACE, ["--axes", "width"],
            ["best accuracy, higher is better: width across", "  64  128", "  2…  1…", "… waiting"],
            id="one axis",
        ),
        pytest.param(
            0, {"width": choice([64, 128])}, ["--axes", "width"],
            ["best accuracy, higher is better: width across", "  64  128", "  ·   ·", "no trials yet"],
            id="no trials yet",
        ),
    ],
)  # fmt: skip
def test_status_draws_the_trials_by_parameters(begun, count, parameters, options, lines):
    shown = CliRunner().invoke(app, ["status", str(begun(count, parameters)), *options])
    assert shown.exit_code == 0, shown.output
    _, drawn = shown.stdout.split("\n\n")
    assert [line.rstrip() for line in drawn.splitlines()] == lines


@pytest.mark.parametrize("count", [0, 3])
def test_status_draws_no_map_before_there_are_values(begun, count):
    shown = CliRunner().invoke(app, ["status", str(begun(count))])
    assert shown.exit_code == 0, shown.output
    assert "is better" not in shown.stdout


def test_status_draws_nothing_where_nothing_is_searched(begun):
    directory = str(begun(1, {"lr": 0.1}))
    assert "best " not in CliRunner().invoke(app, ["status", directory]).stdout.partition("\n\n")[2]
    grid = json.loads(CliRunner().invoke(app, ["status", directory, "--json"]).stdout)["grid"]
    (cell,) = grid["cells"]
    assert (grid["axes"], cell["at"], cell["trials"], cell["status"]) == ([], [], {"pending": 1}, {"waiting": 1})


def test_json_of_status_has_the_grid_over_the_chosen_axes(begun):
    directory = str(begun(3))
    whole, part = (
        json.loads(CliRunner().invoke(app, ["status", directory, "--json", *options]).stdout)["grid"]
        for options in ([], ["--axes", "width"])
    )
    assert [axis["name"] for axis in whole["axes"]] == ["lr", "width", "optimizer.name", "optimizer.momentum"]
    assert part["axes"] == [{"name": "width", "labels": ["64", "128"], "values": [64, 128], "edges": []}]
    assert [(cell["at"], cell["trials"]) for cell in part["cells"]] == [([0], {"pending": 2}), ([1], {"pending": 1})]


def test_status_says_why_each_waiting_trial_waits(begun):
    directory = str(begun(9))
    stopped = CliRunner().invoke(app, ["status", directory]).stdout
    assert "9 trials (0, 1, 2, …): waits until the study is resumed" in stopped
    with closing(RecordedJournal.open(directory)):
        shown = CliRunner().invoke(app, ["status", directory]).stdout
    assert "waiting      5 trials (0, 2, 4, …): reason 0" in shown
    assert "         4 trials (1, 3, 5, …): reason 1" in shown
    assert json.loads(CliRunner().invoke(app, ["status", directory, "--json"]).stdout)["waiting"] == {
        "reason 0": {"count": 5, "first": [0, 2, 4]},
        "reason 1": {"count": 4, "first": [1, 3, 5]},
    }


@pytest.mark.thorough
def test_status_of_ten_thousand_trials_is_fast(begun):
    directory = begun(10_000)
    with closing(RecordedJournal.open(directory)):
        begin = time.process_time()
        shown = CliRunner().invoke(app, ["status", str(directory)])
        assert time.process_time() - begin < 4.0  # about 0.4; a factor of ten for a slow, shared machine
    assert "5000 trials (0, 2, 4, …): reason 0" in shown.stdout


def test_status_of_trials_without_a_number(begun):
    directory = begun(3, {"width": choice([64])} | {"lr": choice([1, 2, 3])})
    with RecordedJournal.open(directory) as journal:
        journal.record_reports("1", [Report(0, 1, {"accuracy": float("nan")}, 1.0)])
        journal.record_reports("1", [Report(1, 1, {}, 1.0, TrialState.FAILED, "its model raised")])
    shown = CliRunner().invoke(app, ["status", str(directory)])
    assert shown.exit_code == 0
    assert shown.stdout.splitlines()[-1] == "✗ failed ▸ interrupted … waiting"
    cells = json.loads(CliRunner().invoke(app, ["status", str(directory), "--json"]).stdout)["grid"]["cells"]
    assert [cell["best"] for cell in cells] == [None] * len(cells)


def test_trials_of_a_killed_engine_are_interrupted_in_every_look(begun):
    directory = begun(3)
    with RecordedJournal.open(directory) as journal:
        journal.record_reports("1", [Report(0, 1, {"accuracy": 0.5}, 1.0)])
    looks = ("status", "trials", "best")
    said = [CliRunner().invoke(app, [name, str(directory)]).stdout for name in looks]
    told = {name: json.loads(CliRunner().invoke(app, [name, str(directory), "--json"]).stdout) for name in looks}
    assert [("interrupted" in text, "running" in text) for text in said] == [(True, False)] * 3
    assert told["status"]["trials"]["interrupted"] == 1
    assert "running" not in told["status"]["trials"]
    assert [row["state"] for row in told["trials"]] == ["interrupted", "pending", "pending"]
    assert told["best"]["state"] == "interrupted"


def test_trials_come_best_first(shoal, ended):
    _, directory = ended
    rows = json.loads(shoal("trials", directory, "--json", cwd=directory).stdout)
    losses = [row["metrics"]["valid_loss"] for row in rows]
    assert losses == sorted(losses)
    few = shoal("trials", directory, "--limit", 2, cwd=directory)
    lines = few.stdout.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["trial", *(str(row["trial"]) for row in rows[:2])]
    assert few.stderr == "shoal: 2 of 4 trials\n"


def test_best_names_a_checkpoint_that_plain_torch_loads(shoal, ended):
    _, directory = ended
    best = json.loads(shoal("best", directory, "--json", cwd=directory).stdout)
    assert best["trial"] == json.loads(shoal("trials", directory, "--json", cwd=directory).stdout)[0]["trial"]
    content = torch.load(best["checkpoint"], weights_only=True)
    assert (content["trial"], content["epoch"], content["model"]["weight"].shape) == (best["trial"], 3, (1, 1))
    shown = shoal("best", directory, cwd=directory).stdout
    assert f"checkpoint: {best['checkpoint']}\n" in shown
    assert "config.lr" in shown


def test_a_look_at_a_study_imports_nothing_heavy(ended):
    _, directory = ended
    commands = ["status", "trials", "best"]
    code = (
        "import sys\n"
        "from shoal.__main__ import main\n"
        f"for command in {commands}:\n"
        f"    sys.argv[1:] = [command, {str(directory)!r}]\n"
        "    try:\n        main()\n"
        "    except SystemExit as end:\n        assert not end.code\n"
        "    heavy = {'torch', 'optuna', 'pandas', 'scipy', 'numpy', 'matplotlib'} & {*sys.modules}\n"
        "    print('heavy after', command, heavy or 'nothing')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    heavy = [line for line in done.stdout.splitlines() if line.startswith("heavy")]
    assert heavy == [f"heavy after {command} nothing" for command in commands]


def test_resuming_an_ended_study_changes_nothing(shoal, ended):
    _, directory = ended
    before = shoal("trials", directory, "--json", cwd=directory).stdout
    done = shoal("resume", directory, "--json", cwd=directory)
    assert done.returncode == 0
    assert json.loads(done.stdout)["finished"]
    assert shoal("trials", directory, "--json", cwd=directory).stdout == before


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param(
            "def broken():\n    return 1 / 0\n\n\nbroken()\n",
            [
                "Traceback (most recent call last):",
                '  File "{path}", line 5, in <module>',
                "    broken()",
                '  File "{path}", line 2, in broken',
                "    return 1 / 0",
                "           ~~^~~",
                "ZeroDivisionError: division by zero",
            ],
            id="exception",
        ),
        pytest.param(
            "import not_there_at_all\n",
            [
                "Traceback (most recent call last):",
                '  File "{path}", line 1, in <module>',
                "    import not_there_at_all",
                "ModuleNotFoundError: No module named 'not_there_at_all'",
            ],
            id="import",
        ),
        pytest.param(
            "x = (1,\n",
            ['  File "{path}", line 1', "    x = (1,", "        ^", "SyntaxError: '(' was never closed"],
            id="syntax",
        ),
    ],
)
def test_an_error_of_the_file_is_shown_as_python_shows_it(shoal, text, expected, tmp_path):
    path = written(tmp_path, text)
    done = shoal("run", path, cwd=tmp_path)
    assert done.returncode == 1
    first = f"shoal: starting\nshoal: running {path}\n"
    assert done.stderr.startswith(first)
    shown = done.stderr.removeprefix(first)
    assert shown.splitlines() == [line.replace("{path}", str(path)) for line in expected]
    assert shown == subprocess.run([sys.executable, path], capture_output=True, text=True).stderr


def test_a_file_finds_its_neighbours_and_sets_the_status(shoal, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "neighbour.py").write_text("STATUS = 5\n")
    written(folder, "import sys, neighbour\nprint(__name__, sys.argv[1:])\nsys.exit(neighbour.STATUS)\n")
    done = shoal("run", "folder/study.py", "a", cwd=tmp_path)
    assert (done.stdout, done.returncode) == ("__main__ ['a']\n", 5)


def test_a_file_without_a_study_is_told_so(shoal, tmp_path):
    path = written(tmp_path, "print('nothing')\n")
    done = shoal("run", path, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[2:] == [f"error: {path} ended without a call of shoal.tune, so there is no study"]


def test_an_error_of_shoal_is_one_line_below_that_of_the_file(shoal, tmp_path):
    path = script(tmp_path, space='{"lr": shoal.choice([])}')
    done = shoal("run", path, cwd=tmp_path)
    assert done.returncode == 1
    _, _, file, line, _, error = done.stderr.splitlines()
    assert file.startswith(f'  File "{path}", line ')
    assert line == "    study = shoal.tune("
    assert error.startswith("error: ")
    assert "choice" in error


def test_a_run_says_at_once_what_it_does(shoal, tmp_path):
    """The file is run after that and imports torch; neither the command nor the study imports what it does not need."""
    path = script(tmp_path)
    before = "{'torch', 'numpy', 'rich', 'optuna', 'shoal.cli.app'}"
    after = "{'torch._dynamo', 'sympy', 'optuna', 'pandas'}"
    path.write_text(
        f"import sys\nassert not {before} & {{*sys.modules}}\nprint('mine', file=sys.stderr)\n{path.read_text()}\n"
        f"assert not {after} & {{*sys.modules}}\n"
    )
    options = ["--directory", "piped", "--backend", "inline"]
    done = subprocess.run([*SHOAL, "run", path, *options], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert lines[:3] == ["shoal: starting", f"shoal: running {path}", "mine"]
    assert lines[3].startswith("shoal: Line: 4 trials, 12 epochs in all, by Random(n=4, epochs=3")
    assert lines[3].endswith("; minimises valid_loss")
    assert (
        lines[4]
        == "shoal: batch size 32 (default: the config has no batch_size), or the DataLoader's; cpu:0; directory piped"
    )
    assert lines[-5:-1] == ["shoal: next:", *(f"shoal:   shoal {verb} piped" for verb in ("status", "best", "page"))]
    assert lines[-1].startswith("shoal:   shoal export piped ")
    best = shoal("best", "piped", cwd=tmp_path)
    assert best.stderr == f"shoal: export the model: {lines[-1].removeprefix('shoal:   ')}\n"
    done = shoal("resume", "piped", cwd=tmp_path)
    lines = done.stderr.splitlines()
    assert lines[0].startswith("shoal: Line: 4 trials, 12 epochs in all")
    assert lines[1].endswith("; cpu:0; resumes after 12 of 12 epochs; directory piped")


def test_a_study_in_which_all_fail_is_status_1(shoal, tmp_path):
    path = script(tmp_path, loss='return F.mse_loss(model(batch[0]), batch[1]) * float("nan")')
    done = shoal("run", path, "--directory", "nan", "--backend", "inline", "--json", cwd=tmp_path)
    assert done.returncode == 1
    assert json.loads(done.stdout)["trials"]["failed"] == 4
    assert "error: all 4 trials failed:" in done.stderr
    assert "4 failed: loss is not finite at step 1 of epoch 1 (trials 0-3" in done.stderr
    assert "shoal trials nan" in done.stderr
    assert "not finite" in shoal("trials", "nan", cwd=tmp_path).stdout
    assert "error: no trial" in shoal("best", "nan", cwd=tmp_path).stderr


SLOW = "time.sleep(0.1 * os.path.exists('slow')); return F.mse_loss(model(batch[0]), batch[1])"


@pytest.fixture
def begin(tmp_path):
    """Starts a study in a process of its own, and returns that process when an epoch has been reported."""
    started = []

    def start(**changes):
        path = script(tmp_path, **changes)
        process = subprocess.Popen(
            [*SHOAL, "run", path, "--directory", "stopped"],
            cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def status(directory):
    done = CliRunner().invoke(app, ["status", str(directory), "--json"])
    return json.loads(done.stdout) if done.exit_code == 0 else None


def wait_for(condition, seconds=300):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def table(shoal, directory):
    """What a study found, but nothing that depends on the time: which arrays there were changes the last digits."""
    rows = json.loads(
        shoal("trials", directory, "--json", cwd=directory).stdout, parse_float=lambda text: float(f"{float(text):.9g}")
    )
    return [{name: row[name] for name in ("trial", "state", "config", "metrics", "best", "epochs")} for row in rows]


def test_ctrl_c_saves_and_resume_goes_on_to_the_same_end(shoal, begin, tmp_path):
    directory = tmp_path / "stopped"
    (tmp_path / "slow").touch()
    process = begin(loss=SLOW, epochs="40")
    wait_for(lambda: (now := status(directory)) is not None and now["epochs_done"] > 0)
    running = status(directory)
    assert running["pid"] == process.pid
    assert running["seconds_left"] > 0
    assert {job["purpose"] for use in running["devices"] for job in use["jobs"]} == {"train"}
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=300)
    (tmp_path / "slow").unlink()
    assert process.returncode == 1
    assert "shoal: resume with: shoal resume stopped\n" in told
    assert "Traceback" not in told
    left = shoal("status", "stopped", cwd=tmp_path)
    assert left.stderr == "shoal: the study is not running; resume it with: shoal resume stopped\n"
    assert not status(directory)["finished"]
    done = shoal("resume", "stopped", "--json", "--backend", "inline", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["epochs_done"] == 160
    whole = shoal("run", script(tmp_path, epochs="40"), "--directory", "whole", "--backend", "inline", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    assert table(shoal, directory) == table(shoal, tmp_path / "whole")


TWICE = """
import os, signal, threading, time

def interrupt():
    while not os.path.exists("training"):
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)
    while signal.getsignal(signal.SIGINT) is not signal.default_int_handler:  # until the first one is handled
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGINT)

if __name__ == "__main__":
    threading.Thread(target=interrupt, daemon=True).start()
"""


def test_a_second_ctrl_c_ends_at_once(shoal, tmp_path):
    path = script(tmp_path, loss="open('training', 'w').close(); time.sleep(3600)")
    path.write_text(TWICE + path.read_text())
    done = shoal("run", path, "--directory", "stopped", cwd=tmp_path)
    assert done.returncode == 1
    assert "shoal: resume with: shoal resume stopped\n" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("change", "place"),
    [
        pytest.param(
            "UPDATE trials SET epoch = 'abc' WHERE number = 1", "`epoch` is 'abc' where `number` is 1", id="text"
        ),
        pytest.param("UPDATE trials SET config = '[1, {' WHERE number = 1", "trial 1 is not understood", id="JSON"),
        pytest.param("UPDATE trials SET config = '[1]' WHERE number = 1", "trial 1 is not understood", id="a list"),
        pytest.param('UPDATE trials SET metrics = \'{"loss": "low"}\'', "the metric 'loss' is 'low'", id="metric"),
        pytest.param("UPDATE trials SET errors = NULL", "`errors` is None", id="errors"),
        pytest.param("UPDATE trials SET state = 'lost'", "'lost' is not a valid TrialState", id="state"),
        pytest.param("UPDATE trials SET objective = 'good'", "`objective` is 'good'", id="objective"),
        pytest.param("UPDATE trials SET reason = x'ff'", "`reason` is b'\\xff'", id="bytes"),
        pytest.param("UPDATE study SET value = '{' WHERE key = 'spec'", "its study is not understood", id="study"),
        pytest.param("UPDATE study SET value = json_set(value, '$.space', '{}')", "the space of its study", id="space"),
        pytest.param("UPDATE study SET value = json_set(value, '$.metric', 3)", "`metric` must be", id="no metric"),
        pytest.param("UPDATE study SET value = json_remove(value, '$.mode')", "is not understood (TypeE", id="no mode"),
        pytest.param("DELETE FROM study WHERE key = 'spec'", "its study is not understood (KeyError", id="no spec"),
        pytest.param("UPDATE runs SET started = 'then'", "`started` is 'then'", id="a run"),
        pytest.param("INSERT INTO study VALUES ('note', '5')", "of its study `note` must be a text", id="a note"),
        pytest.param("INSERT INTO study VALUES ('edits', '[1]')", "of its study `edits` must be a", id="edits"),
        pytest.param("UPDATE trials SET epoch = -5", "`epoch` is -5, below 0", id="epochs"),
        pytest.param("DELETE FROM runs", "no process has run the study in", id="no run"),
    ],
)
def test_a_journal_with_bad_values_is_an_error_that_names_the_place(begun, change, place):
    directory = begun(2)
    with closing(sqlite3.connect(directory / "journal.sqlite")) as connection, connection:
        connection.execute(change)
    told = []
    for command in (["status"], ["trials"], ["best"], ["report", "--json"]):
        error = CliRunner().invoke(app, [*command, str(directory)]).exception
        assert isinstance(error, ShoalError | None | SystemExit), repr(error)
        told.append(str(error))
    assert any(place in each for each in told), told
