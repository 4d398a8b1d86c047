"""The import order of the design, and that the core stays free of torch."""

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import shoal

ROOT = Path(shoal.__file__).parent
ORDER = [
    "core",
    "host",
    "algorithms",
    "spec",
    "plan",
    "task",
    "fuse",
    "train",
    "programs",
    "pack",
    "reproduce",
    "run",
    "journal",
    "callbacks",
    "study",
    "look",
    "simulate",
    "integrations",
    "arguments",
    "study_requests",
    "results",
    "run_study",
    "api",
    "cli",
]
"""Packages from the bottom up: a module imports only from its own package and from those before it."""

TORCH = ("task", "fuse", "train", "pack", "reproduce", "integrations")
TORCH_FREE = [package for package in ORDER if package not in TORCH]
ABOVE_ALL = {"testing", "__init__", "__main__"}
"""The conformance suites, the package itself and `python -m shoal` import what they like."""

MODULES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path) for path in MODULES}


@cache
def imports(path: Path) -> list[str]:
    """Modules of shoal that a module imports, anywhere in it; `from package import module` counts as that module."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            found.extend(name if name in NAMES else node.module or "" for name in submodules)
        elif isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
    return [name for name in found if name == "shoal" or name.startswith("shoal.")]


def package_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def has_only_a_docstring(path: Path) -> bool:
    return len(ast.parse(path.read_text()).body) == 1


def test_imports_only_from_rooms_before() -> None:
    below = [path for path in MODULES if package_of(name_of(path)) not in ABOVE_ALL]
    homeless = sorted({package_of(name_of(path)) for path in below} - set(ORDER))
    assert not homeless, f"{homeless} have no place in the order; see the layout in the design"
    wrong = [
        f"{name_of(path)} imports {imported}, which has no place before it in the order"
        for path in below
        for imported in imports(path)
        if package_of(imported) not in ORDER[: ORDER.index(package_of(name_of(path))) + 1]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_tree_of_the_architecture_page_is_the_order() -> None:
    _, tree, *_ = (ROOT.parents[1] / "docs/architecture.md").read_text().split("src/shoal/\n")
    assert re.findall(r"^  (\w+)(?:/|\.py) ", tree.split("```")[0], re.MULTILINE) == [*ORDER, "testing"]


def test_only_who_measures_knows_the_fields_of_a_profile() -> None:
    """All others ask `Costs`. The virtual back end and its scenarios measure, too; the command line shows profiles."""
    measuring = ("core", "plan.cost", "fuse", "train", "programs", "simulate", "testing")
    others = {"shoal.run.virtual", "shoal.run.virtual_job", "shoal.cli.history"}
    users = {
        name_of(path)
        for path in MODULES
        if not name_of(path).startswith(tuple(f"shoal.{room}." for room in measuring))
        and any(isinstance(x, ast.alias) and x.name == "Profile" for x in ast.walk(ast.parse(path.read_text())))
    }
    assert users == others


def test_no_package_init_is_imported_from_inside() -> None:
    packages = {name_of(path) for path in MODULES if path.name == "__init__.py"}
    wrong = [
        f"{name_of(path)} imports the package {imported}; import the module that defines the name"
        for path in MODULES
        if path.name != "__init__.py"
        for imported in imports(path)
        if imported in packages
    ]
    assert not wrong, "\n".join(wrong)


def test_rooms_of_the_core_import_no_torch() -> None:
    """All in one process, which says after which module torch was there."""
    names = [
        name_of(path) for path in MODULES if path.name != "__main__.py" and package_of(name_of(path)) in TORCH_FREE
    ]
    code = f"import sys\nfor name in {names!r}:\n    __import__(name)\n    if 'torch' in sys.modules: sys.exit(name)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, f"torch is imported by {done.stderr}"


def test_no_module_is_longer_than_five_hundred_lines() -> None:
    lines = {name_of(path): len(path.read_text().splitlines()) for path in MODULES}
    assert {name: count for name, count in lines.items() if count > 500} == {}


def test_the_loop_of_a_study_is_at_most_150_lines() -> None:
    assert len((ROOT / "study" / "engine.py").read_text().splitlines()) <= 150


def test_the_state_machine_of_a_study_has_no_clock_and_no_process() -> None:
    """Nothing that it is made of imports what could wait, write or start anything, but for the job history."""
    to_do, found = ["shoal.study.core"], set()
    while to_do:
        if (name := to_do.pop()) not in found:
            found.add(name)
            to_do += imports(ROOT.parent.joinpath(*name.split(".")).with_suffix(".py"))
    assert {package_of(name) for name in found} & {"run", "journal", "train", "look", "cli"} == set()
    waits = {"asyncio", "concurrent", "multiprocessing", "queue", "select", "selectors", "subprocess", "threading"}
    outside = waits | {"datetime", "os", "signal", "socket", "sqlite3", "time"}
    users = {name for name in found if outside & modules_imported(name)}
    assert users == {"shoal.plan.cost.history"}, "the job history, which the state machine is given"


def modules_imported(name: str) -> set[str]:
    """Names at the top of what a module imports."""
    tree = ast.parse(ROOT.parent.joinpath(*name.split(".")).with_suffix(".py").read_text())
    froms = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    plain = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return {each.split(".")[0] for each in froms | plain}


def test_exports_are_declared_and_exist() -> None:
    wrong = []
    for path in MODULES:
        if path.name == "__main__.py" or has_only_a_docstring(path):
            continue
        module = importlib.import_module(name_of(path))
        names = getattr(module, "__all__", None)
        if names is None:
            wrong.append(f"{name_of(path)} has no __all__")
            continue
        wrong += [f"{name_of(path)} exports {name} twice" for name, times in Counter(names).items() if times > 1]
        wrong += [
            f"{name_of(path)} exports {name}, which it does not have" for name in names if not hasattr(module, name)
        ]
    assert not wrong, "\n".join(wrong)


def test_every_public_name_of_the_package_is_there() -> None:
    for name in shoal.__all__:
        assert getattr(shoal, name) is not None
    assert set(shoal.__all__) <= set(dir(shoal))


def test_windows_is_refused_in_words() -> None:
    code = "import sys; sys.platform = 'win32'; import shoal"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "ImportError: Shoal needs Linux or macOS" in done.stderr
