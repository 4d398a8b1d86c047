"""The code on the front page and in the guides runs as it stands."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = [
    pytest.param(code, id=f"{page.stem}-{number}")
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))
]


@pytest.mark.parametrize("code", BLOCKS)
def test_python_block_runs(code: str, script: Callable[..., tuple[int, str, str]], tmp_path: Path) -> None:
    path = tmp_path / "readme.py"
    path.write_text(code)
    status, printed, errors = script(path, cwd=tmp_path)
    assert status == 0, printed + errors


def test_there_is_code() -> None:
    assert len(BLOCKS) >= 8


PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", prose)
    assert [link for link in links if not (page.parent / link).exists()] == []
