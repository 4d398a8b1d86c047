"""The files that a task is defined in: as they were when its study began, and what has changed in them since."""

import ast
import difflib
import hashlib
import pickletools
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from shoal.paths import absolute, here

__all__ = ["Edit", "Sources", "edits", "files_named", "followed", "modules_named", "sources"]

Sources = Mapping[str, Mapping[str, str | None]]
"""Path of each file -> its "digest" and its "text"; None of a text that is none, or too long to be kept."""

_LONGEST = 200_000
"""Bytes of a file whose text is kept, so that it can be said what has changed."""
_SHOWN = 40
"""Lines of the difference between two texts that are told."""
_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD = Path(sysconfig.get_path("stdlib"))


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


def modules_named(content: bytes, home: str) -> tuple[Path | None, list[Path]]:
    """The project of a pickled object; and, in order, the files there of the modules that it names or that its script
    imports, with those of `followed`.

    The project is the directory from which the module that defines it is imported, that of the script, or the working
    directory of a notebook; None of what is installed or of the standard library, which has no files.

    Args:
        content: pickled; every name in it of a module that was imported counts.
        home: name of the module that defines the object. Of "__main__" only what it imports counts: what is defined
            there is pickled whole.
    """
    path = _file(sys.modules.get(home))
    project = here() if path is None else _project(path, home)
    if _INSTALLED & set(project.parts) or project.is_relative_to(_STANDARD):  # a class that `type` made is of "abc"
        return None, []
    names = {text for _, text, _ in pickletools.genops(content) if isinstance(text, str) and text in sys.modules}
    named = {file for name in names for file in _files(name.split("."), project)}
    if path is None or home != "__main__":
        return project, followed(named, project)
    return project, [file for file in followed({path, *named}, project) if file != path]


def followed(paths: Iterable[Path], project: Path) -> list[Path]:
    """Files, and those of the modules of a project that they import, anywhere in them, and so on; in order.

    Args:
        paths: of the files, in the project.
        project: directory in which modules are found. None of them need be imported.
    """
    known: set[Path] = set()
    to_do = list(paths)
    while to_do:
        if (path := to_do.pop()) not in known:
            known.add(path)
            to_do += [file for name in _imports(path, project) for file in _files(name, project)]
    return sorted(known)


def files_named(arguments: Sequence[str], directory: Path) -> list[Path]:
    """The files that a command names, in order: arguments that are paths of files, also after "=".

    Args:
        arguments: the program and its arguments.
        directory: in which it runs.
    """
    named = {text for argument in arguments if "{" not in argument for text in (argument, argument.partition("=")[2])}
    return sorted(path for text in named if text and "\0" not in text and (path := directory / text).is_file())


def _project(path: Path, home: str) -> Path:
    """The directory from which a module is imported, or in which a script is."""
    spec = sys.modules[home].__spec__  # of `python -m`, which knows it by its name; a script has none
    package = (home if spec is None else spec.name).count(".") + (path.name == "__init__.py")
    return path.parents[min(package, len(path.parents) - 1)]


def _file(module: ModuleType | None) -> Path | None:
    name = getattr(module, "__file__", None)
    return absolute(name) if isinstance(name, str) and name.endswith(".py") else None


def _files(name: Sequence[str], project: Path) -> Iterator[Path]:
    """Those of a module and of the packages that it is in, as far as they are there."""
    for end in range(1, len(name) + 1):
        place = project.joinpath(*name[:end])
        yield from [file for file in (place / "__init__.py", place.with_name(f"{place.name}.py")) if file.is_file()][:1]


def _imports(path: Path, project: Path) -> Iterator[Sequence[str]]:
    """Names of what a file imports, anywhere in it, in their parts; some are no modules."""
    try:
        found = _imported(path.read_bytes())
    except OSError:
        return
    for level, parts in found:
        package = path.relative_to(project).parts[:-level] if level else ()
        yield [*package, *parts]


@lru_cache(maxsize=256)
def _imported(source: bytes) -> list[tuple[int, list[str]]]:
    """What a text imports, by level, 0 if absolute, and the parts of its name; nothing if it is no Python."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return []
    found: list[tuple[int, list[str]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(0, alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module.split(".") if node.module else []
            found += [(node.level, [*base, alias.name]) for alias in node.names]
    return found


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
