"""The import order of the design, and that the core stays free of torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import shoal

ROOT = Path(shoal.__file__).parent
ORDER = [
    *("errors", "pickling", "domain", "space", "objective", "trial", "algorithms"),
    *("cost", "cluster", "schedule", "planner"),
    *("task", "opaque", "trainable", "fuse", "pack", "worker"),
    *("backend", "simulate", "journal", "report", "upkeep", "setting", "engine", "arguments", "study", "cli"),
]
"""Rooms from the bottom up: a module imports only from its own room and from those before it."""

TORCH_FREE = [room for room in ORDER if room not in ("task", "fuse", "pack", "worker")]
ABOVE_ALL = {"testing", "__init__"}
"""The conformance suites and the package itself import what they like."""

MODULES = sorted(ROOT.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> list[str]:
    """Modules of shoal that a module imports, anywhere in it; `from package import module` counts as that module."""
    known = {name_of(other) for other in MODULES}
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            found.extend(name if name in known else node.module or "" for name in submodules)
        elif isinstance(node, ast.Import):
            found.extend(alias.name for alias in node.names)
    return [name for name in found if name == "shoal" or name.startswith("shoal.")]


def room(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_only_from_rooms_before(path: Path) -> None:
    own = room(name_of(path))
    if own in ABOVE_ALL:
        pytest.skip("may import everything")
    assert own in ORDER, f"{own} has no place in the order; see the layout in the design"
    for imported in imports(path):
        place = f"{name_of(path)} imports {imported}"
        assert room(imported) in ORDER, place
        assert ORDER.index(room(imported)) <= ORDER.index(own), f"{place}, which comes later in the order"


@pytest.mark.parametrize("path", [path for path in MODULES if path.name != "__init__.py"], ids=name_of)
def test_no_package_init_is_imported_from_inside(path: Path) -> None:
    packages = {name_of(other) for other in MODULES if other.name == "__init__.py"}
    within = [name for name in imports(path) if name in packages]
    assert not within, f"{name_of(path)} imports the package {within}; import the module that defines the name"


@pytest.mark.parametrize("name", TORCH_FREE)
def test_room_imports_no_torch(name: str) -> None:
    path = ROOT / name
    modules = [name_of(each) for each in ([*path.rglob("*.py")] if path.is_dir() else [path.with_suffix(".py")])]
    code = f"import sys\nfor name in {modules!r}: __import__(name)\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0, f"shoal.{name} imports torch"


@pytest.mark.parametrize("path", [path for path in MODULES if path.name != "__main__.py"], ids=name_of)
def test_exports_are_declared_and_exist(path: Path) -> None:
    module = __import__(name_of(path), fromlist=["__all__"])
    if path.read_text().count("\n") <= 1 + ast.get_docstring(ast.parse(path.read_text()), clean=False).count("\n"):
        return  # nothing but a docstring
    assert sorted(module.__all__) == sorted(set(module.__all__))
    for name in module.__all__:
        assert hasattr(module, name), f"{name_of(path)} exports {name}, which it does not have"


def test_every_public_name_of_the_package_is_there() -> None:
    for name in shoal.__all__:
        assert getattr(shoal, name) is not None
    assert set(shoal.__all__) <= set(dir(shoal))
