"""Source files of a task: their contents when the study began, and their changes since."""

import ast
import difflib
import hashlib
import inspect
import linecache
import os
import pickletools
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import FunctionType, ModuleType

import psutil

from shoal.host.paths import absolute, working_directory

__all__ = [
    "NOTEBOOK_CELL",
    "Edit",
    "Sources",
    "edits",
    "files_in_command",
    "imported_files",
    "imported_packages",
    "is_importable",
    "project_files",
    "script_source",
    "sources",
    "unrecorded_files",
    "written_since_start",
]

Sources = Mapping[str, Mapping[str, str | None]]
"""Path of a file -> its "digest" and its "text"; the text is None if it is not UTF-8, or too long."""

NOTEBOOK_CELL = "notebook_cell.py"
"""Name of the file with the text of a cell."""
_MAX_TEXT_BYTES = 200_000
"""Most bytes of a file whose text is kept, to show its changes later."""
_MAX_DIFF_LINES = 40
"""Most lines of a diff that are shown."""
_INSTALLED = {"site-packages", "dist-packages"}
_STANDARD = Path(sysconfig.get_path("stdlib"))
_SHOAL = Path(__file__).parents[2]


@dataclass(frozen=True)
class Edit:
    """A changed file; `text` is the change, in a line or as a unified diff."""

    path: str
    text: str


def sources(paths: Iterable[Path]) -> dict[str, dict[str, str | None]]:
    """Return the present contents of files; unreadable files are left out."""
    found = {}
    for path in paths:
        if (source := _read_source(path)) is not None:
            found[str(path)] = source
    return found


def edits(recorded: Sources) -> list[Edit]:
    """Return the changes of files since then; runs none of them."""
    found = []
    for path, before in recorded.items():
        now = _read_source(Path(path))
        if now is None:
            found.append(Edit(path, "cannot be read any more"))
        elif now["digest"] != before["digest"]:
            found.append(Edit(path, _difference(path, before["text"], now["text"])))
    return found


def written_since_start(paths: Iterable[str]) -> bool:
    """Return whether a file was written or removed since this process began, which may have imported it before."""
    began = psutil.Process().create_time()
    return any(not (path := Path(each)).exists() or path.stat().st_mtime >= began for each in paths)


def is_importable(name: str) -> bool:
    """Return whether a new process with this `sys.path` would import by this name what this process has by it.

    It would not for a script, and for a module that was loaded by its path or made by hand.
    """
    if name == "__main__":
        return False
    file = getattr(sys.modules.get(name), "__file__", None)
    if isinstance(file, str) and (_INSTALLED & set(Path(file).parts) or Path(file).is_relative_to(_STANDARD)):
        return True
    parent = name.rpartition(".")[0]
    if parent and not is_importable(parent):
        return False
    if parent and file is None:  # the import of its parent makes it
        return True
    places = getattr(sys.modules.get(parent), "__path__", None)
    specs = (finder.find_spec(name, places) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    found = next((spec for spec in specs if spec is not None), None)
    return found is not None and (file is None or _is_same_file(file, found.origin))


def _is_same_file(file: str, other: str | None) -> bool:
    if other is None or file == other:
        return file == other
    return os.path.exists(file) and os.path.exists(other) and os.path.samefile(file, other)


def project_files(content: bytes, module: str) -> tuple[Path | None, list[Path]]:
    """Return the project of a pickled object, and the project's files on which the object depends, in order.

    The project is the directory from which the defining module is imported, the directory of the script, or the working
    directory of a notebook. It is None for installed packages, the standard library and Shoal itself, which have no
    files here. The files are those of the modules that the pickle names or the script imports, and all that these
    import.

    Args:
        content: Pickled bytes; each name of an imported module in them counts.
        module: Name of the defining module. Of "__main__", and of a module that no other process can import, only the
            imports count, since the definitions are in the pickle.
    """
    path = _file_of(sys.modules.get(module))
    project = working_directory() if path is None else _project_of(path, module)
    # A class that `type` made is of "abc"; a class of an integration is of Shoal, which may be installed editable.
    if _INSTALLED & set(project.parts) or project.is_relative_to(_STANDARD) or project == _SHOAL:
        return None, []
    names = {text for _, text, _ in pickletools.genops(content) if isinstance(text, str) and text in sys.modules}
    named = {file for name in names for file in _files_of_module(name.split("."), project)}
    if path is None or is_importable(module):
        return project, imported_files(named, project)
    return project, [file for file in imported_files({path, *named}, project) if file != path]


def script_source(defined: type | FunctionType) -> dict[str, str | None]:
    """Return the "name" and the "text" of the file that defines a class or function.

    Of a definition in a notebook it is that of its cell, under the name `NOTEBOOK_CELL`; in other interactive sessions
    the text is None.
    """
    path = _file_of(sys.modules.get(defined.__module__))
    if path is not None and (source := _read_source(path)) is not None:
        return {"name": path.name, "text": source["text"]}
    parts = [defined] if isinstance(defined, FunctionType) else [inspect.unwrap(each) for each in _functions(defined)]
    own = [each for each in parts if each.__qualname__.startswith(defined.__qualname__)]
    texts = ("".join(linecache.getlines(each.__code__.co_filename)) for each in own)  # a kernel keeps cells there
    return {"name": NOTEBOOK_CELL, "text": next(filter(None, texts), None)}


def _functions(cls: type) -> Iterator[FunctionType]:
    """Yield the methods and properties of a class."""
    for value in vars(cls).values():
        function = getattr(value, "fget", None) or getattr(value, "__func__", value)  # of a property, a static method
        if isinstance(function, FunctionType):
            yield function


def unrecorded_files(content: bytes, recorded: Sources) -> dict[Path, list[Path]]:
    """Return files on which a pickled object depends and that are not among those recorded, by their project.

    These are modules whose classes are attributes of the object. They must have been imported.
    """
    found: dict[Path, list[Path]] = {}
    for name in {text for _, text, _ in pickletools.genops(content) if isinstance(text, str) and text in sys.modules}:
        path = _file_of(sys.modules[name])
        if path is None or str(path) in recorded or not is_importable(name):
            continue
        project = _project_of(path, name)
        if not (_INSTALLED & set(project.parts) or project.is_relative_to(_STANDARD) or project == _SHOAL):
            files = [file for file in imported_files({path}, project) if str(file) not in recorded]
            found[project] = sorted({*found.get(project, ()), *files})
    return found


def imported_packages(text: str) -> set[str]:
    """Return the first parts of the names that a source text imports absolutely."""
    return {parts[0] for level, parts in _imports_of_source(text.encode()) if not level}


def imported_files(paths: Iterable[Path], project: Path) -> list[Path]:
    """Return the files and, transitively, the files of all modules of a project that they import; in order."""
    known: set[Path] = set()
    pending = list(paths)
    while pending:
        if (path := pending.pop()) not in known:
            known.add(path)
            pending += [file for name in _imports_of_file(path, project) for file in _files_of_module(name, project)]
    return sorted(known)


def files_in_command(arguments: Sequence[str], directory: Path) -> list[Path]:
    """Return the files that a command names, in order: arguments that are paths of files, also after "="."""
    named = {text for argument in arguments if "{" not in argument for text in (argument, argument.partition("=")[2])}
    return sorted(path for text in named if text and "\0" not in text and (path := directory / text).is_file())


def _project_of(path: Path, module: str) -> Path:
    """Return the directory from which a module is imported, or the directory of a script."""
    spec = sys.modules[module].__spec__  # set by `python -m`; None for a script
    package = (module if spec is None else spec.name).count(".") + (path.name == "__init__.py")
    return path.parents[min(package, len(path.parents) - 1)]


def _file_of(module: ModuleType | None) -> Path | None:
    name = getattr(module, "__file__", None)
    return absolute(name) if isinstance(name, str) and name.endswith(".py") else None


def _files_of_module(name: Sequence[str], project: Path) -> Iterator[Path]:
    """Yield the existing files of a module and of its parent packages."""
    for end in range(1, len(name) + 1):
        place = project.joinpath(*name[:end])
        yield from [file for file in (place / "__init__.py", place.with_name(f"{place.name}.py")) if file.is_file()][:1]


def _imports_of_file(path: Path, project: Path) -> Iterator[Sequence[str]]:
    """Yield dotted names that a file imports, split into parts; some are not modules."""
    try:
        found = _imports_of_source(path.read_bytes())
    except OSError:
        return
    for level, parts in found:
        package = path.relative_to(project).parts[:-level] if level else ()
        yield [*package, *parts]


@lru_cache(maxsize=256)
def _imports_of_source(source: bytes) -> list[tuple[int, list[str]]]:
    """Return the imports of a source text: level, 0 if absolute, and parts of the name; empty if it is not Python."""
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


def _read_source(path: Path) -> dict[str, str | None] | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    text = None
    if len(data) <= _MAX_TEXT_BYTES:
        try:
            text = data.decode()
        except UnicodeDecodeError:
            text = None
    return {"digest": hashlib.blake2b(data, digest_size=16).hexdigest(), "text": text}


def _difference(path: str, before: str | None, now: str | None) -> str:
    if before is None or now is None:
        return "holds something else"
    lines = difflib.unified_diff(before.splitlines(), now.splitlines(), f"{path} (before)", path, n=1, lineterm="")
    shown, omitted = [], 0
    for number, line in enumerate(lines):
        if number < _MAX_DIFF_LINES:
            shown.append(line)
        else:
            omitted += 1
    return (
        "\n".join([*shown, *([f"... and {omitted} lines more"] if omitted else [])])
        or "only the ends of its lines changed"
    )
