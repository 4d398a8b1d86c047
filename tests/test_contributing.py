"""CONTRIBUTING.md names only commands, files and options that there are."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
MAKEFILE = (ROOT / "Makefile").read_text()


def test_every_make_target_is_in_the_makefile() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*?)\n\n", MAKEFILE, re.MULTILINE | re.DOTALL)
    targets = set(phony.replace("\\", "").split())
    (benchmarks,) = re.findall(r"^BENCHMARKS := (.*?)\n\n?\w", MAKEFILE, re.MULTILINE | re.DOTALL)
    targets |= {f"quick-{name}" for name in benchmarks.replace("\\", "").split()}
    named = set(re.findall(r"`make ([\w-]+)", TEXT))
    assert named - targets == set()
    described = set(re.findall(r"^\| `make ([\w-]+)` \|", TEXT, re.MULTILINE))
    assert set(phony.replace("\\", "").split()) - described - {"test-steps", "test-thorough-steps"} == set()


def test_every_path_exists() -> None:
    paths = re.findall(r"`((?:src|tests|docs|benchmarks|tools)/[\w./]*)`", TEXT)
    paths += re.findall(r"(?:pytest|python) ((?:tests|benchmarks)/[\w./]+)", TEXT)
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_options_are_those_of_the_commands() -> None:
    sources = [ROOT / "tests" / "conftest.py", *(ROOT / "benchmarks").glob("*.py"), ROOT / "tools" / "gpu.py"]
    known = "".join(path.read_text() for path in sources)
    assert [option for option in set(re.findall(r"--[a-z][a-z-]*", TEXT)) if f'"{option}"' not in known] == []


def test_the_version_is_the_same_in_both_places() -> None:
    project = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    module = re.search(r'^VERSION = "(.*)"$', (ROOT / "src/shoal/core/version.py").read_text(), re.MULTILINE)
    assert project is not None
    assert module is not None
    assert project[1] == module[1]
