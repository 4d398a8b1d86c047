"""The shape of a Python package: how much there is of it, how it is divided, and where it is over its limits.

    python tools/shape.py            the figures of src/shoal
    python tools/shape.py FOLDER     those of another package

Prints each figure with its limit, below it whatever exceeds a limit by name, and as the last line one JSON object with
all figures. Under "missed" this object names the figures that are over their limits. The exit status is 1 if there are
any, else 0.

What is counted:

- A line is a line of a file, blank or not. A function's lines begin at its first decorator, and those of functions
  inside it are its own, too. `tune` and `resume` of `api.py` may have any length. A class's methods are the functions
  directly in its body; properties count, and overloads of one are one.
- An import is an import statement anywhere in a module, also below `if TYPE_CHECKING`. An `__init__.py` that re-exports
  a name is not an importer of its file, since it does not use the name. Nobody could merge `__init__.py` or
  `__main__.py`, so they are not counted as having a single importer.
- A file that nobody in the package imports (an entry point, a suite for users) has no single importer.
- A strategy that is imported by its registry alone (a file called `registry.py` or `table.py`) counts. The line
  "of these, in a registry" says how many there are, since one strategy per file is how they are meant to be.
- A class name occurs twice if two class statements of the package have it, at any depth.
"""

import argparse
import ast
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

__all__ = ["LIMITS", "Shape", "main", "measure"]

LIMITS: Mapping[str, tuple[float, float]] = {
    "files": (0, 350),
    "lines": (0, 62_000),
    "single_importer": (0, 40),
    "class_names_twice": (0, 0),
    "median_lines": (100, 200),
    "files_over_500_lines": (0, 0),
    "functions_over_60_lines": (0, 0),
    "classes_over_25_methods": (0, 0),
}
"""The least and the most of each figure."""

FILE_LINES, FUNCTION_LINES, METHODS = 500, 60, 25
LONG_SIGNATURES = {"api.py": ("tune", "resume")}
"""Functions of any length, by file: those whose parameters, each explained, are the whole interface."""
REGISTRIES = ("registry", "table")


@dataclass(frozen=True)
class Shape:
    """What was found.

    Args:
        figures: by name, as in `LIMITS`.
        named: figure -> what it counts, one line each, for those that count things to be mended.
        registered: files with a single importer that is a registry.
    """

    figures: Mapping[str, float]
    named: Mapping[str, list[str]]
    registered: int

    @property
    def missed(self) -> list[str]:
        """Names of the figures that are not within their limits."""
        return [name for name, (least, most) in LIMITS.items() if not least <= self.figures[name] <= most]


def measure(package: Path) -> Shape:
    """Read all modules of a package.

    Args:
        package: its folder, whose name is the package's.

    Raises:
        ValueError: there is no module in it.
    """
    paths = sorted(package.rglob("*.py"))
    if not paths:
        raise ValueError(f"there is no Python file below {package}")
    texts = {path: path.read_text() for path in paths}
    trees = {path: ast.parse(text, str(path)) for path, text in texts.items()}
    shown = {path: path.relative_to(package).as_posix() for path in paths}
    lines = {path: len(text.splitlines()) for path, text in texts.items()}
    homes: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name].append(shown[path])
    single = list(_single_importers(trees, package))
    named = {
        "single_importer": [f"{shown[path]}: {shown[user]}" for path, user in single],
        "class_names_twice": [f"{name}: {', '.join(found)}" for name, found in sorted(homes.items()) if len(found) > 1],
        "files_over_500_lines": [f"{shown[path]}: {count}" for path, count in lines.items() if count > FILE_LINES],
        "functions_over_60_lines": [
            f"{shown[path]}: {each}"
            for path in paths
            for each in _functions(trees[path], LONG_SIGNATURES.get(shown[path], ()))
        ],
        "classes_over_25_methods": [f"{shown[path]}: {each}" for path in paths for each in _classes(trees[path])],
    }
    figures = {
        "files": len(paths),
        "lines": sum(lines.values()),
        "median_lines": median(lines.values()),
        **{name: len(found) for name, found in named.items()},
    }
    registered = sum(user.stem in REGISTRIES for _, user in single)
    return Shape({name: figures[name] for name in LIMITS}, named, registered)


def _single_importers(trees: Mapping[Path, ast.Module], package: Path) -> Iterator[tuple[Path, Path]]:
    """Modules that one other module imports, each with that one."""
    names = {_name(path, package): path for path in trees}
    users: defaultdict[Path, set[Path]] = defaultdict(set)
    for path, tree in trees.items():
        if path.name != "__init__.py":
            for imported in _imports(tree, path, package):
                if imported in names and names[imported] != path:
                    users[names[imported]].add(path)
    for path, importers in sorted(users.items()):
        if len(importers) == 1 and path.name not in ("__init__.py", "__main__.py"):
            yield path, importers.pop()


def _name(path: Path, package: Path) -> str:
    """What a module is called when it is imported."""
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imports(tree: ast.Module, path: Path, package: Path) -> Iterator[str]:
    """Names of modules that a module imports; some of them name what is in a module instead."""
    here = _name(path, package).split(".")
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = here[: len(here) - node.level] if node.level else []
            source = ".".join([*above, *([node.module] if node.module else [])])
            yield source
            yield from (f"{source}.{alias.name}" for alias in node.names)


def _functions(tree: ast.Module, allowed: Collection[str]) -> Iterator[str]:
    """Functions that are too long, without those of allowed names at the top of the module."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            count = (node.end_lineno or first) - first + 1
            if count > FUNCTION_LINES and not (node in tree.body and node.name in allowed):
                yield f"{node.name}, {count}"


def _classes(tree: ast.Module) -> Iterator[str]:
    """Classes that have too many methods."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            methods = Counter(
                each.name for each in node.body if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef))
            )
            if len(methods) > METHODS:
                yield f"{node.name}, {len(methods)}"


def main(arguments: list[str] | None = None) -> int:
    """Print the figures; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("package", nargs="?", type=Path, default=Path(__file__).parents[1] / "src" / "shoal")
    shape = measure(parser.parse_args(arguments).package.resolve())
    for name, (least, most) in LIMITS.items():
        limit = f"{least:,.0f} to {most:,.0f}" if least else f"at most {most:,.0f}"
        missed = "  missed" if name in shape.missed else ""
        print(f"{name.replace('_', ' '):<24} {shape.figures[name]:>8,}  {limit}{missed}")
        if missed:
            for line in shape.named.get(name, ()):
                print(f"    {line}")
        if name == "single_importer":
            print(f"{'  of these, in a registry':<24} {shape.registered:>8,}")
    figures = {**shape.figures, "single_importer_registry": shape.registered}
    print(json.dumps({**figures, "missed": shape.missed}))
    return 1 if shape.missed else 0


if __name__ == "__main__":
    sys.exit(main())
