"""The examples run as they stand and say what they promise."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


SEARCH = "shoal.Random(128, epochs=10)"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("search", "least"),
    [
        pytest.param(SEARCH, 0.95, marks=pytest.mark.thorough, id="as it stands"),
        pytest.param("shoal.Random(6, epochs=3)", 0.8, id="short"),
    ],
)
def test_digits(search, least, tmp_path):
    text = (EXAMPLES / "digits.py").read_text()
    assert text.count(SEARCH) == 1
    script = tmp_path / "digits.py"
    script.write_text(text.replace(SEARCH, search))
    environment = {**os.environ, "SHOAL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-W", "error", script]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    best = re.search(r"Best: accuracy (\d\.\d+) by trial", done.stdout)
    assert best is not None
    assert float(best.group(1)) > least
    assert re.search(r"\d+\.\d s for \d+ trials", done.stdout)


def test_lines(tmp_path):
    """Killed between what it saves and what it prints, by hand: it prints that when it goes on."""
    program = [sys.executable, str(EXAMPLES / "lines.py"), "--lr", "1.0", "--out", tmp_path, "--epochs"]
    for epochs, steps in (("2", [1, 2]), ("4", [2, 3, 4])):
        done = subprocess.run([*program, epochs], capture_output=True, text=True, timeout=60, check=True)
        assert [json.loads(line)["step"] for line in done.stdout.splitlines()] == steps


def test_rule():
    """Its rule keeps the contract, and is taken."""
    program = [sys.executable, "-W", "error", str(EXAMPLES / "rule.py")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    assert re.fullmatch(r"16 members: \d+\.\d ms in a loop, \d+\.\d ms by the rule\n", done.stdout)
    assert not done.stderr


def test_command(tmp_path):
    environment = {**os.environ, "SHOAL_CACHE": str(tmp_path / "cache")}
    shoal = [sys.executable, "-W", "error", "-c", "from shoal.cli import main; main()"]
    search = ["--metric", "accuracy", "--mode", "max", "--algorithm", "successive_halving"]
    search += ["--trials", "3", "--epochs", "3"]
    place = ["--directory", "study", "--devices", "cpu:2", "--json"]
    program = [sys.executable, str(EXAMPLES / "command.py"), "--lr", "{lr}", "--decay", "{decay}"]
    command = [*shoal, "run", "--space", str(EXAMPLES / "command.toml"), *search, *place, "--", *program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    study = json.loads(done.stdout.splitlines()[-1])
    assert study["best"]["value"] > 0.6
    by_hand = [*program[:2], "--lr", "1.0", "--epochs", "2"]
    alone = subprocess.run(by_hand, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert [json.loads(line)["step"] for line in alone.stdout.splitlines()] == [1, 2]


@pytest.mark.slow
def test_lora(tmp_path):
    """Adapters of several ranks train on one base, and the best one is written as `peft` writes it."""
    environment = {**os.environ, "SHOAL_CACHE": str(tmp_path / "cache")}
    text = EXAMPLES.parent / "docs" / "fusion.md"
    command = [sys.executable, EXAMPLES / "lora.py", "--text", text, "--trials", "4", "--epochs", "1"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    base = re.search(r"The base model: loss (\d\.\d+)", done.stdout)
    best = re.search(r"Best of 4 adapters: loss (\d\.\d+) by trial \d", done.stdout)
    assert base is not None
    assert best is not None
    assert float(best.group(1)) < 4
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


@pytest.mark.slow
def test_trainer(tmp_path):
    """Trials of a `Trainer` script train at once, and the best model is written as `transformers` writes it."""
    environment = {**os.environ, "SHOAL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, EXAMPLES / "trainer.py", "--trials", "3", "--epochs", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    best = re.search(r"Best: accuracy (\d\.\d+) by trial \d", done.stdout)
    assert best is not None
    assert float(best.group(1)) > 0.2
    assert (tmp_path / "best" / "model.safetensors").exists()


def test_images(tmp_path):
    """Pictures are decoded by loader processes."""
    environment = {**os.environ, "SHOAL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-W", "error", EXAMPLES / "images.py", "--trials", "4", "--epochs", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    best = re.search(r"Best of 4 trials: accuracy (\d\.\d+) by trial \d", done.stdout)
    assert best is not None
    assert float(best.group(1)) > 0.5


def test_lightning_module(tmp_path):
    """A LightningModule trains in a search as it stands."""
    environment = {**os.environ, "SHOAL_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, EXAMPLES / "lightning_module.py", "--trials", "4", "--epochs", "2"]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    best = re.search(r"Best of 4 trials: accuracy (\d\.\d+) with", done.stdout)
    assert best is not None
    assert float(best.group(1)) > 0.7
