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
    """Killed between what it saves and what it prints, by hand: it prints that when it continues."""
    program = [sys.executable, str(EXAMPLES / "lines.py"), "--lr", "1.0", "--out", tmp_path, "--epochs"]
    for epochs, steps in (("2", [1, 2]), ("4", [2, 3, 4])):
        done = subprocess.run([*program, epochs], capture_output=True, text=True, timeout=60, check=True)
        assert [json.loads(line)["step"] for line in done.stdout.splitlines()] == steps


def test_rule(script, tmp_path):
    """Its rule keeps the contract, and is taken."""
    status, printed, errors = script(EXAMPLES / "rule.py", cwd=tmp_path)
    assert (status, errors) == (0, "")
    assert re.fullmatch(r"16 members: \d+\.\d ms in a loop, \d+\.\d ms by the rule\n", printed)


@pytest.mark.parametrize(
    ("algorithm", "trials"), [("random", 1), pytest.param("successive_halving", 2, marks=pytest.mark.thorough)]
)
def test_command(algorithm, trials, shoal, tmp_path):
    search = ["--metric", "accuracy", "--mode", "max", "--algorithm", algorithm]
    search += ["--trials", str(trials), "--epochs", "3"]
    place = ["--directory", "study", "--devices", "cpu:2", "--json"]
    program = [sys.executable, str(EXAMPLES / "command.py"), "--lr", "{lr}", "--decay", "{decay}"]
    command = ["run", "--space", EXAMPLES / "command.toml", *search, *place, "--", *program]
    done = shoal(*command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    study = json.loads(done.stdout.splitlines()[-1])
    assert study["best"]["value"] > 0.6


@pytest.mark.thorough  # fast, the example of lines prints by hand
def test_command_by_hand():
    program = [sys.executable, str(EXAMPLES / "command.py"), "--lr", "1.0", "--epochs", "2"]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    assert [json.loads(line)["step"] for line in done.stdout.splitlines()] == [1, 2]


TEXT = EXAMPLES.parent / "docs" / "fusion.md"
SHORT = ["--trials", "4", "--epochs", "2"]


@pytest.mark.in_turns(6)
@pytest.mark.parametrize(
    "backend",
    [pytest.param("local", marks=pytest.mark.thorough, id="as it stands"), pytest.param("inline", id="in one process")],
)
@pytest.mark.parametrize(
    ("name", "arguments", "promised", "low", "high", "kept"),
    [
        pytest.param(
            *("trainer", SHORT, r"Best: accuracy (.+) by trial \d", 0.2, 1.01, "best/model.safetensors"),
            id="trials of a Trainer script, the best of which transformers writes",
        ),
        pytest.param(
            *("images", SHORT, r"Best of 4 trials: accuracy (.+) by trial \d", 0.5, 1.01, ""),
            id="pictures that loader processes decode",
        ),
        pytest.param(
            *("lora", ["--text", TEXT, "--steps", "50", "--trials", "4", "--epochs", "1"]),
            *(r"The base model: loss \d\.\d+(?:.|\n)*Best of 4 adapters: loss (.+) by trial \d", 0.0, 4.0),
            "adapter/adapter_model.safetensors",
            id="adapters of several ranks on one base, the best of which peft writes",
        ),
        pytest.param(
            *("sft", SHORT, r"Best: loss (.+) by trial \d", 0.0, 2.6, "adapter/adapter_model.safetensors"),
            id="adapters as SFTTrainer trains them",
        ),
        pytest.param(
            *("dpo", SHORT, r"Best: accuracy (.+) by trial \d", 0.5, 1.01, "adapter/adapter_model.safetensors"),
            id="adapters as DPOTrainer trains them",
        ),
        pytest.param(
            *("lightning_module", SHORT, r"Best of 4 trials: accuracy (.+) with", 0.7, 1.01, ""),
            id="a LightningModule as it stands",
        ),
    ],
)
def test_a_search_with_another_library(name, arguments, promised, low, high, kept, backend, script, tmp_path):
    """In one process, it imports the other library once."""
    path = EXAMPLES / f"{name}.py"
    if backend == "inline":
        text, path = path.read_text(), tmp_path / f"{name}.py"
        assert text.count("algorithm=") == 1
        path.write_text(text if "backend=" in text else text.replace("algorithm=", "backend='inline', algorithm="))
    status, printed, errors = script(path, *arguments, cwd=tmp_path)
    assert status == 0, errors
    best = re.search(promised, printed)
    assert best is not None
    assert low < float(best.group(1)) < high
    assert (tmp_path / kept).exists()
