"""What a user gave, in the process that has it: what a study does never changes the classes there."""

import functools
import importlib.util
import json
import subprocess
import sys
import threading
from abc import ABCMeta
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import cloudpickle
import pytest
import torch
from own_classes import CLASSES, SEARCH

import shoal
from shoal.core.errors import ShoalError
from shoal.host.pickling import dumped, loaded, original_or_loaded, register_original
from shoal.host.sources import is_importable


def test_a_script_searches_what_its_classes_say_now_and_each_study_keeps_its_own(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    main = 'if __name__ == "__main__":\n    folder = sys.argv[1]\n    check("inline")\n    check("local")\n'
    script.write_text(CLASSES + SEARCH + main)
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    one = torch.ones(1)  # this process has no such classes
    first, second = (shoal.Study(tmp_path / f"{name}-inline") for name in ("first", "second"))
    model = first.best_model()
    assert model(one).item() == 1
    assert second.best_model()(one).item() == 10
    assert model(one).item() == first.best_model()(one).item() == 1


class Counter:
    def __init__(self) -> None:
        self.count = 0


def test_the_object_that_was_given_is_recalled_until_it_changes() -> None:
    value = Counter()
    content = dumped(value, "it cannot be pickled", ShoalError, "leave it out")
    assert original_or_loaded(content) is not value, "nobody said that it may be used"
    register_original(content, value)
    assert original_or_loaded(content) is value
    value.count = 1
    assert original_or_loaded(content).count == 0
    value.lock = threading.Lock()  # type: ignore[attr-defined]
    assert original_or_loaded(content).count == 0, "what cannot be pickled any more has changed"


def test_a_function_of_a_script_may_set_torchs_backends() -> None:
    names: dict[str, Any] = {"__name__": "__main__", "torch": torch}
    exec("def seed():\n    torch.backends.cudnn.deterministic = True\n    return torch.backends.cudnn", names)
    with torch.backends.cudnn.flags():
        assert loaded(dumped(names["seed"], "", ShoalError, ""))() is torch.backends.cudnn


def test_classes_that_are_pickled_by_value_are_made_anew_each_time() -> None:
    class Local:
        factor = 1

    class Sort(Enum):
        ONE = 1

    content = dumped((Local(), Sort.ONE), "it cannot be pickled", ShoalError, "leave it out")
    (one, sort), (other, other_sort) = loaded(content), loaded(content)
    Local.factor = 2
    assert (one.factor, other.factor, Local().factor) == (1, 1, 2)
    assert len({type(one), type(other), Local}) == len({type(sort), type(other_sort), Sort}) == 3


def called_elsewhere(value: object, folder: Path) -> Any:
    """What a function returns in another process, which has only its pickle."""
    (folder / "pickle").write_bytes(dumped(value, "it cannot be pickled", ShoalError, "leave it out"))
    assert cloudpickle.list_registry_pickle_by_value() == set(), "others pickle as before"
    code = (
        "import json; from shoal.host.pickling import loaded; print(json.dumps(loaded(open('pickle', 'rb').read())()))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_cached_function_of_a_script_is_kept_with_its_cache_settings(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__", "functools": functools}
    text = """
@functools.lru_cache(maxsize=7, typed=True)
def count(n):
    return n if n < 2 else count(n - 1) + count(n - 2)

class Loader:
    @staticmethod
    @functools.cache
    def load():
        return [count(20)]

def used():
    return count.cache_parameters(), count(60), Loader.load() is Loader.load()
"""
    exec(text, names)
    assert called_elsewhere(names["used"], tmp_path) == [{"maxsize": 7, "typed": True}, 1548008755920, True]


CONF = """
import dataclasses, functools

@dataclasses.dataclass
class Net:
    size: int = 3

@functools.cache
def load():
    return Net(4)
"""


def module_by_path(folder: Path) -> ModuleType:
    (folder / "conf.py").write_text(CONF)
    spec = importlib.util.spec_from_file_location("my_conf", folder / "conf.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["my_conf"] = module
    spec.loader.exec_module(module)
    return module


def module_by_hand(folder: Path) -> ModuleType:
    module = sys.modules["my_conf"] = ModuleType("my_conf")
    exec(CONF, vars(module))
    return module


def module_of_another_path(folder: Path) -> ModuleType:
    module = module_by_path(folder)
    (folder / "other").mkdir()
    (folder / "other" / "my_conf.py").write_text("")
    sys.path.insert(0, str(folder / "other"))
    return module


def module_of_a_package(folder: Path) -> ModuleType:
    module_by_hand(folder).__path__ = [str(folder)]
    (folder / "inner.py").write_text(CONF)
    return importlib.import_module("my_conf.inner")


@pytest.mark.parametrize("make", [module_by_path, module_by_hand, module_of_another_path, module_of_a_package])
def test_a_module_that_no_other_process_can_import_is_kept(
    make: Callable[[Path], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("my_conf", "my_conf.inner"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = make(tmp_path)

    def by_attribute() -> list[int]:
        return [module.Net().size, module.load().size]

    load, net = module.load, module.Net

    def by_name() -> list[int]:
        return [net().size, load().size]

    assert called_elsewhere(by_attribute, tmp_path) == [3, 4]
    assert called_elsewhere(by_name, tmp_path) == [3, 4]


@pytest.mark.parametrize(
    ("name", "importable"),
    [
        *(("json", True), ("json.decoder", True), ("torch.nn", True), ("builtins", True), ("shoal.core.space", True)),
        *((__name__, True), ("own_classes", True), ("__main__", False), ("no_such_module", False)),
    ],
)
def test_which_modules_another_process_can_import(name: str, importable: bool) -> None:
    assert is_importable(name) is importable


class ByName:
    def __reduce__(self) -> str:
        return "only_here"


def test_what_a_script_has_by_its_name_only_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    value = ByName()
    value.__module__ = "__main__"
    monkeypatch.setattr(sys.modules["__main__"], "only_here", value, raising=False)
    with pytest.raises(ShoalError, match=r"it cannot be pickled \('only_here' can be pickled by its name only"):
        dumped([value, "__main__"], "it cannot be pickled", ShoalError, "leave it out")
    assert loaded(dumped(["__main__", "only_here"], "", ShoalError, "")) == ["__main__", "only_here"]


def locked(name: str) -> Any:
    """An object of a class that is pickled by value, of which one thing holds a lock."""

    class Local:
        size = 1

        def __init__(self) -> None:
            self.kept = {"lock": threading.Lock()} if name == "attribute" else None

        @property
        def double(self) -> int:
            return uses() if name == "function" else 2 * self.size

    def uses() -> int:
        return int(lock.acquire())

    def guarded(function: Any) -> Any:
        def inner(self: Any) -> Any:
            with lock:
                return function(self)

        return inner

    def waits(self: Any, lock: Any = threading.Lock()) -> None:  # noqa: B008
        lock.acquire()

    lock = threading.RLock()
    if name == "method":
        Local.loss = guarded(lambda self: 1)  # type: ignore[attr-defined]
    if name == "default":
        Local.loss = waits  # type: ignore[attr-defined]
    if name == "static":
        Local.loss = staticmethod(guarded(lambda self: 1))  # type: ignore[attr-defined]
    if name == "abstract":
        Local = ABCMeta("Local", (Local,), {"loss": guarded(lambda self: 1)})  # type: ignore[misc]  # noqa: N806
    if name == "class":
        Local.lock = threading.Lock()  # type: ignore[attr-defined]
    return Local()


@pytest.mark.parametrize(
    ("name", "culprit"),
    [
        ("attribute", "its attribute 'kept': "),
        ("class", r"the attribute 'lock' of its class locked.<locals>.Local: "),
        (
            "function",
            r"'lock', which locked.<locals>.uses \(of the method 'double' of its class locked.<locals>.Local\) "
            "closes over: ",
        ),
        ("method", r"'lock', which the method 'loss' of its class locked.<locals>.Local closes over: "),
        ("static", r"'lock', which the method 'loss' of its class locked.<locals>.Local closes over: "),
        ("default", r"'lock', which the method 'loss' of its class locked.<locals>.Local has as a default: "),
        ("abstract", r"'lock', which the method 'loss' of its class Local closes over: "),
    ],
)
def test_what_cannot_be_pickled_is_named_with_the_cause(name: str, culprit: str) -> None:
    with pytest.raises(
        ShoalError, match=rf"^it cannot be pickled \({culprit}cannot pickle .*[lL]ock.*\); leave it out$"
    ):
        dumped(locked(name), "it cannot be pickled", ShoalError, "leave it out")


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="a cached_property holds no lock any more")
def test_a_cached_property_of_a_script_is_named_with_the_cause() -> None:
    class Local:
        @functools.cached_property
        def width(self) -> int:
            return 4

    cause = r"the attribute 'width' of its class .*Local, a functools.cached_property, which holds a lock before Python"
    with pytest.raises(ShoalError, match=cause):
        dumped(Local(), "it cannot be pickled", ShoalError, "leave it out")
