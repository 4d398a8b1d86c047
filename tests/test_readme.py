"""The code on the front page and in the guides runs as it stands."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
GUIDES = sorted((ROOT / "docs").rglob("*.md"))
EXAMPLES = ("lightning", "lora", "trainer")
"""Guides whose code is much like an example, which tests run."""

Script = Callable[..., tuple[int, str, str]]


def blocks(*pages: Path) -> list[Any]:
    """The Python code of pages."""
    return [
        pytest.param(code, id=f"{page.stem}-{number}", marks=[pytest.mark.thorough] * (page.stem in EXAMPLES))
        for page in pages
        for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
    ]


def check_runs(code: str, script: Script, directory: Path) -> None:
    path = directory / "readme.py"
    path.write_text(code)
    status, printed, errors = script(path, cwd=directory)
    assert status == 0, printed + errors


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("code", blocks(ROOT / "README.md"))
def test_code_of_the_front_page_runs(code: str, script: Script, tmp_path: Path) -> None:
    check_runs(code, script, tmp_path)


@pytest.mark.in_turns(6)
@pytest.mark.parametrize("code", blocks(*GUIDES))
def test_code_of_a_guide_runs(code: str, script: Script, tmp_path: Path) -> None:
    check_runs(code, script, tmp_path)
