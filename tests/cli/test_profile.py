"""`shoal profile` as a user calls it: a process, a real file, exit statuses."""

import json
import re
from functools import partial

import pytest
from typer.testing import CliRunner

from shoal.cli.app import app
from shoal.plan.cost.history import History, environment

STUDY = """
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import Dataset

import shoal

sent = []


class Slow(Dataset):
    def __init__(self, samples):
        self.x = torch.linspace(-1, 1, 4 * samples).view(samples, 4)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        time.sleep(0.002)  # so that fetching outweighs steps, whatever else runs
        return self.x[index], self.x[index].sum()


class Sums(shoal.Task):
    def data(self, config):
        return Slow(96), Slow(8)

    def model(self, config):
        {model}
        return nn.Sequential(nn.Linear(4, config["width"]), nn.Linear(config["width"], 1))

    def optimizer(self, model, config):
        return torch.optim.SGD(model.parameters(), lr=config["lr"])

    def loss(self, model, batch):
        x, y = batch
        {loss}


if __name__ == "__main__":
    print("arguments:", sys.argv[1:])
    {tune}(
        Sums(),
        {{"lr": shoal.loguniform(1e-4, 1e-2), "width": shoal.choice([4, 6])}},
        metric=["valid_loss", "size"],
        mode=["min", "max"],
        best_by="size",
        algorithm=shoal.Random(8, epochs=9),
        devices="cpu:1",
    )
    print("never comes here")
"""
DEFAULTS = {"model": "", "loss": "return F.mse_loss(model(x)[:, 0], y)", "tune": "shoal.tune"}


@pytest.fixture(autouse=True)
def surroundings(tmp_path, monkeypatch):
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("SHOAL_DEBUG", raising=False)


def script(directory, **changes):
    path = directory / "study.py"
    path.write_text(STUDY.format(**DEFAULTS | changes))
    return path


@pytest.fixture
def profile(shoal):
    return partial(shoal, "profile")


def test_a_person_sees_before_a_search_that_sharing_pays(profile, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # a reason is on one line
    options = ["--trials", "4", "--devices", "cpu:2", "--seed", "3"]
    done = profile(script(tmp_path), "first", *options, "--", "--lr", "1", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "arguments: ['first', '--lr', '1']" in done.stdout
    assert "never comes here" not in done.stdout
    assert "what decided" in done.stdout
    assert re.search(r"fusing alone saves \d+ %, packing alone saves \d+ %", done.stdout)
    assert re.search(
        r"Sharing pays: expect \d+\.\d times the speed of one trial at a time; one epoch of 4", done.stdout
    )
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "study.py"]
    known = History(tmp_path / "cache" / History().path.name, environment=environment()).all()
    assert len(known) == 2
    assert all(profile.fetch_seconds > 0 for profile in known.values())


def test_json_is_all_there_is_on_standard_output_and_says_what_the_table_does(profile, tmp_path):
    text = 'if config["width"] == 6: raise ValueError("six")'
    done = profile(script(tmp_path, model=text), "--trials", "8", "--seed", "3", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert "arguments" in done.stderr
    arrays = found["arrays"]  # one, or several where fusing does not pay
    (failed,) = found["failed"]
    assert failed["reason"] == "ValueError: six"
    assert sorted(failed["trials"] + [trial for array in arrays for trial in array["trials"]]) == list(range(8))
    assert {config["width"] for array in arrays for config in array["configs"]} == {4}
    assert {array["sample_sharing"] for array in arrays} == {"kept"}
    assert found["device"] == "cpu:0"
    assert found["totals"]["chosen"]["seconds"] < found["totals"]["apart"]["seconds"]


def test_nothing_to_show_is_an_error(profile, tmp_path):
    path = tmp_path / "study.py"
    path.write_text("print('no study here')\n")
    done = profile(path, "--trials", "2", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: ")
    assert "ended without a call of shoal.tune" in done.stderr.splitlines()[-1]
    done = profile(script(tmp_path, model='raise ValueError("bad")'), "--trials", "2", cwd=tmp_path)
    assert done.returncode == 1
    assert "ValueError: bad" in done.stdout
    assert done.stderr.splitlines()[-1] == "error: no configuration could be measured; the reasons are above"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        pytest.param(["profile"], "FILE", id="no file"),
        pytest.param(["profile", __file__, "--trials", "0"], "--trials", id="no trials"),
        pytest.param(["profile", __file__, "--packing", "best"], "cost", id="unknown packing"),
    ],
)
def test_wrong_usage_is_status_2(arguments, hint):
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert hint in result.stderr


def test_an_interrupt_is_a_line_and_status_1(profile, tmp_path):
    stopping = (
        "import os, signal; sent or (sent.append(1), os.kill(os.getpid(), signal.SIGINT)); return model(x).mean()"
    )
    path = script(tmp_path, loss=stopping)
    path.write_text(path.read_text().replace('devices="cpu:1"', 'devices="cpu:1", backend="inline"'))
    done = profile(path, "--trials", "2", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "shoal: stopped; what was measured so far is in the job history"


def test_help_says_what_it_does():
    result = CliRunner().invoke(app, ["profile", "--help"])
    assert result.exit_code == 0
    for option in ("--trials", "--devices", "--packing", "--seed", "--json"):
        assert option in result.stdout
    assert " profile " in CliRunner().invoke(app, ["--help"]).stdout
