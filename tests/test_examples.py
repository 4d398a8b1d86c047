"""The examples run as they stand and say what they promise."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


SEARCH = "shoal.Random(128, epochs=10)"


@pytest.mark.parametrize(
    ("search", "least"),
    [
        pytest.param(SEARCH, 0.95, marks=[pytest.mark.thorough, pytest.mark.slow], id="as it stands"),
        pytest.param("shoal.Random(4, epochs=3)", 0.8, id="short"),
    ],
)
def test_digits(search, least, script, tmp_path):
    text = (EXAMPLES / "digits.py").read_text()
    assert text.count(SEARCH) == 1
    path = tmp_path / "digits.py"
    path.write_text(text.replace(SEARCH, search))
    status, printed, errors = script(path, cwd=tmp_path)
    assert status == 0, errors
    best = re.search(r"Best: accuracy (\d\.\d+) by trial", printed)
    assert best is not None
    assert float(best.group(1)) > least
    assert re.search(r"\d+\.\d s for \d+ trials", printed)


def test_lines(tmp_path):
    """Killed between what it saves and what it prints, by hand: it prints that when it goes on."""
    program = [sys.executable, str(EXAMPLES / "lines.py"), "--lr", "1.0", "--out", tmp_path, "--epochs"]
    for epochs, steps in (("2", [1, 2]), ("4", [2, 3, 4])):
        done = subprocess.run([*program, epochs], capture_output=True, text=True, timeout=60, check=True)
        assert [json.loads(line)["step"] for line in done.stdout.splitlines()] == steps


def test_rule(script, tmp_path):
    """Its rule keeps the contract, and is taken."""
    status, printed, errors = script(EXAMPLES / "rule.py", cwd=tmp_path)
    assert (status, errors) == (0, "")
    assert re.fullmatch(r"16 members: \d+\.\d ms in a loop, \d+\.\d ms by the rule\n", printed)


def test_command(shoal, tmp_path):
    search = ["--metric", "accuracy", "--mode", "max", "--algorithm", "successive_halving"]
    search += ["--trials", "2", "--epochs", "3"]
    place = ["--directory", "study", "--devices", "cpu:2", "--json"]
    program = [sys.executable, str(EXAMPLES / "command.py"), "--lr", "{lr}", "--decay", "{decay}"]
    command = ["run", "--space", EXAMPLES / "command.toml", *search, *place, "--", *program]
    done = shoal(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    study = json.loads(done.stdout.splitlines()[-1])
    assert study["best"]["value"] > 0.6
    by_hand = [*program[:2], "--lr", "1.0", "--epochs", "2"]
    alone = subprocess.run(by_hand, capture_output=True, text=True, timeout=60, check=True)
    assert [json.loads(line)["step"] for line in alone.stdout.splitlines()] == [1, 2]


def test_lora(script, tmp_path):
    """Adapters of several ranks train on one base, and the best one is written as `peft` writes it."""
    text = EXAMPLES.parent / "docs" / "fusion.md"
    short = ["--steps", "50", "--trials", "4", "--epochs", "1"]
    status, printed, errors = script(EXAMPLES / "lora.py", "--text", text, *short, cwd=tmp_path)
    assert status == 0, errors
    base = re.search(r"The base model: loss (\d\.\d+)", printed)
    best = re.search(r"Best of 4 adapters: loss (\d\.\d+) by trial \d", printed)
    assert base is not None
    assert best is not None
    assert float(best.group(1)) < 4
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_trainer(script, tmp_path):
    """Trials of a `Trainer` script train at once, and the best model is written as `transformers` writes it."""
    status, printed, errors = script(EXAMPLES / "trainer.py", "--trials", "3", "--epochs", "2", cwd=tmp_path)
    assert status == 0, errors
    best = re.search(r"Best: accuracy (\d\.\d+) by trial \d", printed)
    assert best is not None
    assert float(best.group(1)) > 0.2
    assert (tmp_path / "best" / "model.safetensors").exists()


def test_images(script, tmp_path):
    """Pictures are decoded by loader processes."""
    status, printed, errors = script(EXAMPLES / "images.py", "--trials", "4", "--epochs", "2", cwd=tmp_path)
    assert status == 0, errors
    best = re.search(r"Best of 4 trials: accuracy (\d\.\d+) by trial \d", printed)
    assert best is not None
    assert float(best.group(1)) > 0.5


def test_lightning_module(script, tmp_path):
    """A LightningModule trains in a search as it stands."""
    status, printed, errors = script(EXAMPLES / "lightning_module.py", "--trials", "4", "--epochs", "2", cwd=tmp_path)
    assert status == 0, errors
    best = re.search(r"Best of 4 trials: accuracy (\d\.\d+) with", printed)
    assert best is not None
    assert float(best.group(1)) > 0.7
