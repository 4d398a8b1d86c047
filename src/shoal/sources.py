"""The files that a task is defined in: as they were when its study began, and what has changed in them since."""

import ast
import difflib
import hashlib
import pickletools
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import resolve_name
from pathlib import Path
from types import ModuleType

__all__ = ["Edit", "Sources", "edits", "files_named", "modules_named", "sources"]

Sources = Mapping[str, Mapping[str, str | None]]
"""Path of each file -> its "digest" and its "text"; None of a text that is none, or too long to be kept."""

_LONGEST = 200_000
"""Bytes of a file whose text is kept, so that it can be said what has changed."""
_SHOWN = 40
"""Lines of the difference between two texts that are told."""
_INSTALLED = {"site-packages", "dist-packages"}


@dataclass(frozen=True)
class Edit:
    """A file that has changed.

    Args:
        path: of the file.
        text: what has changed, in a line or as a unified diff.
    """

    path: str
    text: str


def sources(paths: Iterable[Path]) -> dict[str, dict[str, str | None]]:
    """Files as they are now; those that cannot be read are left out."""
    found = {}
    for path in paths:
        if (source := _read(path)) is not None:
            found[str(path)] = source
    return found


def edits(then: Sources) -> list[Edit]:
    """What has changed in files since. Nothing is run for that."""
    found = []
    for path, before in then.items():
        now = _read(Path(path))
        if now is None:
            found.append(Edit(path, "cannot be read any more"))
        elif now["digest"] != before["digest"]:
            found.append(Edit(path, _difference(path, before["text"], now["text"])))
    return found


def modules_named(content: bytes, home: str) -> list[Path]:
    """Files of the modules that a pickled object names and, in turn, of those that they import, in order.

    Only modules of its own project count: those in the directory from which the one that defines it is imported, or in
    that of the script. What is installed beside them is not its own.

    Args:
        content: pickled; every name of a module in it counts.
        home: name of the module that defines the object, "__main__" too.
    """
    root = _root(home)
    to_do = sorted({argument for _, argument, _ in pickletools.genops(content) if argument in sys.modules})
    known: dict[str, Path] = {}
    while to_do:
        name = to_do.pop()
        module = sys.modules.get(name)
        if name in known or module is None or name == "__main__" or name.partition(".")[0] == "shoal":
            continue
        path = _file(module)
        if path is not None and path.is_relative_to(root) and not _INSTALLED & set(path.relative_to(root).parts):
            known[name] = path
            to_do += _imports(path, module)
    return sorted(set(known.values()))


def files_named(arguments: Sequence[str], directory: Path) -> list[Path]:
    """The files that a command names, in order: arguments that are paths of files, also after "=".

    Args:
        arguments: the program and its arguments.
        directory: in which it runs.
    """
    named = {text for argument in arguments if "{" not in argument for text in (argument, argument.partition("=")[2])}
    return sorted(path for text in named if text and "\0" not in text and (path := directory / text).is_file())


def _root(home: str) -> Path:
    """The directory from which a module is imported; of a notebook, the working directory."""
    path = _file(sys.modules[home]) if home in sys.modules else None
    if path is None:
        return Path.cwd()
    package = home.count(".") + (path.name == "__init__.py")
    return path.parents[min(package, len(path.parents) - 1)]


def _file(module: ModuleType) -> Path | None:
    name = getattr(module, "__file__", None)
    return Path(name).absolute() if isinstance(name, str) and name.endswith(".py") else None


def _imports(path: Path, module: ModuleType) -> Iterator[str]:
    """Names of what a module's file imports, anywhere in it; some are no modules."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # it has been edited since it was imported
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = getattr(module, "__package__", None) or ""
            base = resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)


def _read(path: Path) -> dict[str, str | None] | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    text = None
    if len(data) <= _LONGEST:
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = None
    return {"digest": hashlib.blake2b(data, digest_size=16).hexdigest(), "text": text}


def _difference(path: str, before: str | None, now: str | None) -> str:
    if before is None or now is None:
        return "holds something else"
    lines = difflib.unified_diff(before.splitlines(), now.splitlines(), f"{path} (before)", path, n=1, lineterm="")
    first, left = [], 0
    for number, line in enumerate(lines):
        if number < _SHOWN:
            first.append(line)
        else:
            left += 1
    return (
        "\n".join([*first, *([f"... and {left} lines more"] if left else [])]) or "only the ends of its lines changed"
    )
