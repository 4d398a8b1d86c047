"""docs/architecture.md is true: every file and every name on it is there. Nothing is imported, all is read by `ast`.

So are links to code on the pages for those who change it.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "shoal"
PAGE = ROOT / "docs" / "architecture.md"
TEXT = re.sub(r"```.*?```", "", PAGE.read_text(), flags=re.DOTALL)
LINK = re.compile(r"\[`([\w.]+)`\]\(([^)#]+\.py)\)")
LINKS = LINK.findall(TEXT)
GUIDES = [PAGE, ROOT / "docs" / "extending.md", ROOT / "CONTRIBUTING.md"]
STEPS = re.findall(r"^(\d+)\. (.*)$", TEXT, re.MULTILINE)
QUESTIONS = [row for row in re.findall(r"^\| (.*) \|$", TEXT, re.MULTILINE) if row.partition(" | ")[0].endswith("?")]
IDENTIFIER = r"`([A-Za-z_]\w*(?:\.\w+)*)`"


def defined(body: list[ast.stmt], within: str = "") -> Iterator[str]:
    """Names that statements define: functions, classes with what is in them, and what is assigned."""
    for node in body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield within + node.name
        elif isinstance(node, ast.ClassDef):
            yield within + node.name
            yield from defined(node.body, f"{within}{node.name}.")
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            yield from (within + target.id for target in targets if isinstance(target, ast.Name))


@cache
def names_in(path: Path) -> frozenset[str]:
    return frozenset(defined(ast.parse(path.read_text()).body))


def known() -> set[str]:
    """All that a name on the page may stand for: packages, modules, definitions and their last parts, parameters."""
    found = {"shoal", *(path.stem for path in SOURCE.rglob("*.py")), *(path.name for path in SOURCE.iterdir())}
    for path in SOURCE.rglob("*.py"):
        for name in names_in(path):
            found |= {name, name.rpartition(".")[2]}
        found |= {node.arg for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.arg)}
    return found


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_linked_names_are_defined_in_their_files(page: Path) -> None:
    links = set(LINK.findall(page.read_text()))
    assert links
    files = {link: (page.parent / link).resolve() for _, link in links}
    assert [link for link, path in files.items() if not path.is_file()] == []
    assert [f"{link}: {name}" for name, link in sorted(links) if name not in names_in(files[link])] == []


def test_every_other_name_is_one_of_the_package() -> None:
    names = set(re.findall(IDENTIFIER, TEXT)) - {name for name, _ in LINKS}
    everything = known()
    assert {name for name in names if name.removeprefix("shoal.") not in everything} == set()


def test_files_named_in_prose_exist() -> None:
    paths = re.findall(r"`([\w./]+/[\w./]*)`", TEXT)
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_a_trial_is_followed_in_at_most_forty_functions() -> None:
    assert [int(number) for number, _ in STEPS] == list(range(1, len(STEPS) + 1))
    assert 20 <= len(STEPS) <= 40
    assert [text for _, text in STEPS if not re.match(r"\[`[\w.]+`\]\([^)]+\.py\) ", text)] == []


def test_twenty_questions_have_an_answer_each() -> None:
    assert len(QUESTIONS) == 20
    assert [row for row in QUESTIONS if not re.search(r"\| \[`[\w.]+`\]\([^)]+\.py\)", row)] == []
