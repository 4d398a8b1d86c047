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
CONTINUED = ("cookbook",)
"""Guides whose blocks continue one another; they run as one script."""

Script = Callable[..., tuple[int, str, str]]


def blocks(*pages: Path) -> list[Any]:
    """The scripts of pages: each Python block, or all blocks of a page in which they continue one another."""
    scripts = {page: re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL) for page in pages}
    return [
        pytest.param(code, id=f"{page.stem}-{number}", marks=[pytest.mark.thorough] * (page.stem in EXAMPLES))
        for page, found in scripts.items()
        for number, code in enumerate(["\n".join(found)] if page.stem in CONTINUED else found)
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


def test_the_front_page_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
