"""The documentation names all that is public, and what it names is there. `make docs` checks that its site builds."""

import ast
import dataclasses
import importlib
import inspect
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.main import get_command

import shoal
from shoal import algorithms, callbacks, pack, reproduce, run, testing
from shoal.cli.app import app
from shoal.core.version import VERSION
from shoal.plan import schedule

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {
    path: re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for path in (*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md")))
}
"""Page -> its prose."""
REFERENCE = "\n".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
DIRECTIVE = re.compile(r"^\.\. (currentmodule|auto\w+):: ([\w.]+)((?:\n   :[\w-]+:.*)*)", re.MULTILINE)


def documented() -> Iterator[str]:
    """Full names in the reference: those of directives, and all of a module whose members are listed."""
    within = ""
    for directive, name, options in DIRECTIVE.findall(REFERENCE):
        if directive == "currentmodule":
            within = name
        elif directive == "automodule":
            yield from () if ":no-members:" in options else (f"{name}.*",)
        else:
            yield name if name.startswith("shoal.") else f"{within}.{name}"


DOCUMENTED = list(documented())


@pytest.mark.parametrize(
    ("module", "elsewhere"),
    [
        pytest.param(shoal, {"fuse": "shoal.fuse.fuse", "Callback": "shoal.callbacks.Callback"}, id="shoal"),
        pytest.param(
            algorithms, {name: f"shoal.{name}" for name in shoal.__all__} | {"ALGORITHMS": ""}, id="algorithms"
        ),
        pytest.param(run, {}, id="back ends"),
        pytest.param(callbacks, {}, id="callbacks"),
        pytest.param(shoal.fuse, {name: f"shoal.{name}" for name in shoal.__all__ if name != "fuse"}, id="fuse"),
        pytest.param(pack, {}, id="pack"),
        pytest.param(reproduce, {name: f"shoal.{name}" for name in shoal.__all__} | {"Seeded": ""}, id="reproduce"),
        pytest.param(schedule, {}, id="schedule"),
        pytest.param(testing, {}, id="testing"),
    ],
)
def test_every_public_name_is_in_the_reference(module, elsewhere):
    home = module.__name__
    if f"{home}.*" in DOCUMENTED:
        return
    names = {name: elsewhere.get(name, f"{home}.{name}") for name in module.__all__}
    assert {name for name, place in names.items() if place and place not in DOCUMENTED} == set()


def test_every_public_name_of_integrations_is_in_the_reference():
    """Read, not imported: their libraries are optional."""
    missing = []
    for path in (ROOT / "src/shoal/integrations").glob("*.py"):
        if not re.search(rf"shoal\.integrations\.{path.stem}\.", REFERENCE):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names = [f"shoal.integrations.{path.stem}.{name}" for name in ast.literal_eval(node.value)]
                missing += [name for name in names if name not in DOCUMENTED]
    assert missing == []


def test_nothing_is_documented_twice():
    assert sorted(name for name in set(DOCUMENTED) if DOCUMENTED.count(name) > 1) == []


def test_every_command_is_on_the_page_of_the_command_line():
    page = (DOCS / "command_line.md").read_text()
    named = re.findall(r"^\| `shoal (\w+)", page, re.MULTILINE)
    assert sorted(named) == sorted(get_command(app).commands), "docs/command_line.md has a row for each command"


def test_the_changelog_has_the_version_and_the_pythons_that_the_project_has():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "CHANGELOG.md").read_text()
    assert f"## {VERSION}\n" in text
    prefix = "Programming Language :: Python :: 3."
    versions = [line.removeprefix(prefix) for line in project["classifiers"] if line.startswith(prefix)]
    assert f"Python 3.{versions[0]} to 3.{versions[-1]}" in text


def is_there(name: str) -> bool:
    """Whether a dotted name leads to a module, what it has, or a field of a class."""
    parts = name.split(".")
    found: object = importlib.import_module(parts[0])
    for place, part in enumerate(parts[1:], 2):
        if dataclasses.is_dataclass(found) and part in {field.name for field in dataclasses.fields(found)}:
            return place == len(parts)
        try:
            found = getattr(found, part) if hasattr(found, part) else importlib.import_module(".".join(parts[:place]))
        except ImportError:
            return False
    return True


def test_names_links_files_and_make_targets_of_all_pages_exist():
    targets = re.findall(r"[\w-]+", (ROOT / "Makefile").read_text())
    missing = []
    for page, text in PAGES.items():
        links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", text)
        missing += [f"{page}: {link}" for link in links if not (page.parent / link).exists()]
        files = re.findall(r"`((?:src|tests|docs|benchmarks|tools|examples)/[\w./]*)`", text)
        missing += [f"{page}: {file}" for file in files if not (ROOT / file).exists()]
        named = [name.removeprefix("quick-") for name in re.findall(r"`make ([\w-]+)", text)]
        missing += [f"{page}: make {name}" for name in named if name not in targets]
        names = re.findall(r"`(shoal(?:\.\w+)+)(?:\(.*?\))?`", text)
        missing += [f"{page}: {name}" for name in set(names) if not is_there(name)]
        for name, link in set(re.findall(r"\[`([\w.]+)`\]\(([^)#]+\.py)\)", text)):
            within = defined((page.parent / link).read_text())
            missing += [f"{page}: {name} of {link}"] * (not within.issuperset(name.split(".")))
    assert missing == []


def test_arguments_and_methods_that_pages_name_exist():
    """Keywords of `tune` and `resume`, and methods of `study` and `Study(...)`, wherever they stand in prose."""
    keywords = {name: set(inspect.signature(getattr(shoal, name)).parameters) for name in ("tune", "resume")}
    methods = {*dir(shoal.Study), "optimize"}  # that of an Optuna study
    missing = []
    for page, text in PAGES.items():
        for code in re.findall(r"`([^`]+)`", text):
            try:
                tree = ast.parse(f"({code})" if "=" not in code else f"f({code})", mode="eval")
            except SyntaxError:
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Call) and (name := ast.unparse(node.func).removeprefix("shoal.")) in keywords:
                    given = {keyword.arg for keyword in node.keywords if keyword.arg}
                    missing += [f"{page}: {code}: {argument}" for argument in given - keywords[name]]
                if isinstance(node, ast.Attribute) and re.match(r"study$|(shoal\.)?Study\(", ast.unparse(node.value)):
                    missing += [f"{page}: {code}"] * (node.attr not in methods)
    assert missing == []


def test_every_name_of_the_architecture_is_one_of_the_package():
    sources = list((ROOT / "src").rglob("*.py"))
    known = {part for path in sources for part in path.relative_to(ROOT / "src").with_suffix("").parts}
    known.update(*(defined(path.read_text()) for path in sources))
    names = re.findall(r"`([A-Za-z_]\w*(?:\.\w+)*)`", PAGES[DOCS / "architecture.md"])
    assert [name for name in names if not known.issuperset(name.split("."))] == []


def defined(code: str) -> set[str]:
    """What is a function, a class, a variable, an attribute or a parameter of a module."""
    found = re.findall(r"\b(?:def|class) (\w+)|\b(\w+)\s*(?:=|:\s)|^\s+(\w+)[,)]", code, re.MULTILINE)
    return {name for names in found for name in names if name}
