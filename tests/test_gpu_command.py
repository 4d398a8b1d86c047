"""`tools/gpu.py` takes what is missing or older than its code, in order, while minutes last, and loses no result."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import psutil
import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ROOT / "tools"


def loaded() -> ModuleType:
    sys.path.append(str(TOOLS))
    spec = importlib.util.spec_from_file_location("gpu_tool", TOOLS / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_tool"] = module  # which dataclasses ask for
    spec.loader.exec_module(module)
    return module


gpu = loaded()
session = importlib.import_module("session")
MACHINE = {
    "device": "NVIDIA H100", "devices": 1, "gib": 79.2, "driver": "580.1", "cuda": "13.0",
    "torch": "2.11.0", "python": "3.12.3",
}  # fmt: skip
PAGE = f"# On a GPU\n\nBefore.\n\n{gpu.BEGIN}\n\nold\n\n{gpu.END}\n\n## Kept\n\nAfter.\n"
PRINTS = "print('0.5 ms'); print('{\"figures\": {}, \"missed\": []}')"


def measurement(name: str, code: str = PRINTS, *, least: int = 0, most: int = 60, needs: tuple[str, ...] = ()) -> Any:
    command = ("-c", code)
    return session.Measurement(name, name.title(), least, most, command, command, ("code.py",), needs)


def logs(path: Path, name: str) -> str:
    """Code that notes that it was run."""
    return f"open({str(path)!r}, 'a').write('{name}\\n'); {PRINTS}"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of its own, with the page and one file of code."""
    docs = tmp_path / "docs" / "benchmarks"
    docs.mkdir(parents=True)
    (docs / "gpu.md").write_text(PAGE)
    (tmp_path / "code.py").write_text("first = 1\n")
    monkeypatch.setattr(session, "ROOT", tmp_path)
    monkeypatch.setattr(gpu, "DOCS", docs)
    monkeypatch.setenv("CIFAR10", "somewhere")
    monkeypatch.delenv("OUT", raising=False)
    return tmp_path


def run(measurements: Iterable[Any], *, minutes: float = 5, look: Callable[[], Any] = lambda: MACHINE) -> int:
    return gpu.main(["--minutes", str(minutes)], tuple(measurements), look)


def run_with_one_second_left(tree: Path, each: Any) -> int:
    """Take one measurement that is allowed more time than is left."""
    moments = iter([0.0, 59.0])
    folder = tree / "docs" / "benchmarks" / "gpu"
    one = session.Session([each], [], folder, lambda results: None, dict, lambda: next(moments))
    return one.run(1, MACHINE, {}, toy=False)


def stored(folder: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


def test_one_that_fails_hangs_or_lacks_a_package_does_not_keep_the_others_from_being_taken(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fails = "print('before'); raise SystemExit('no such kernel')"
    hangs = "import time; time.sleep(600)"
    misses = 'print(\'{"missed": ["0.9 | asked 0.6"]}\'); raise SystemExit(1)'
    measurements = (
        measurement("fails", fails),
        measurement("hangs", hangs, most=1),
        measurement("lacks", needs=("no_such_module", "pynvml_of_nobody")),
        measurement("misses", misses),
        measurement("passes"),
    )
    assert run(measurements) == 1
    printed = capsys.readouterr().out
    assert "to take in 5 minutes: fails, hangs, misses, passes" in printed
    assert "missing, but needs no_such_module, pynvml_of_nobody, not installed here" in printed
    assert "left: nothing; without a result: fails, hangs" in printed
    found = stored(tree / "docs" / "benchmarks" / "gpu")
    assert {name: (each["outcome"], each["reason"]) for name, each in found.items()} == {
        "fails": ("failed", "exit status 1: no such kernel"),
        "hangs": ("cut off", "not done in 1 s"),
        "misses": ("done", ""),
        "passes": ("done", ""),
    }
    assert found["passes"]["figures"] == {"figures": {}, "missed": []}
    assert found["passes"]["machine"]["torch"] == "2.11.0"
    page = (tree / "docs" / "benchmarks" / "gpu.md").read_text()
    assert "1 x NVIDIA H100, 79.2 GiB; driver 580.1, CUDA 13.0, torch 2.11.0, Python 3.12.3" in page
    assert "| Misses | done |" in page
    assert "| 0.9 / asked 0.6 |" in page
    assert "0.5 ms" in page
    assert "Not measured yet: Lacks." in page
    assert page.startswith("# On a GPU\n\nBefore.\n")
    assert page.endswith("## Kept\n\nAfter.\n")
    assert "old" not in page


def test_what_is_there_is_taken_again_only_after_a_change_of_its_code(tree: Path) -> None:
    log = tree / "log"
    measurements = (measurement("first", logs(log, "first")), measurement("fails", "raise SystemExit('never')"))
    assert run(measurements) == 1
    assert run(measurements) == 0, "one that failed is not tried again"
    assert log.read_text() == "first\n"
    (tree / "code.py").write_text("first = 2\n")
    assert run(measurements) == 1
    assert log.read_text() == "first\nfirst\n"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({}, "", id="there"),
        pytest.param({"code": "another"}, "older than its code", id="other code"),
        pytest.param({"outcome": "failed"}, "", id="failed"),
        pytest.param({"outcome": "cut off", "limit": 60}, "", id="longer than its limit"),
        pytest.param({"outcome": "cut off", "limit": 20}, "cut off before its time", id="the minutes were over"),
    ],
)
@pytest.mark.usefixtures("tree")
def test_why_a_measurement_is_taken(change: dict[str, Any], reason: str) -> None:
    each = measurement("one")
    result = {"outcome": "done", "limit": 60, "code": session.code_of(each.code)} | change
    assert session.why(each, result) == reason
    assert session.why(each, None) == "missing"


def test_none_is_begun_for_which_too_little_time_is_left(tree: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tree / "log"
    measurements = [
        measurement("short", logs(log, "short"), least=50),
        measurement("long", logs(log, "long"), least=100, most=200),
        measurement("tiny", logs(log, "tiny"), least=5),
    ]
    moments = iter([0.0, 10.0, 40.0, 110.0])
    folder = tree / "results"
    some = session.Session(measurements, [], folder, lambda results: None, dict, lambda: next(moments))
    assert some.run(2.0, {**MACHINE, "cores": 1, "note": ""}, {}, toy=False) == 0
    assert log.read_text() == "short\ntiny\n"
    assert {name: each["limit"] for name, each in stored(folder).items()} == {"short": 60, "tiny": 10}
    assert "left: long (needs 100 s)" in capsys.readouterr().out


def test_figures_are_kept_until_a_measurement_is_not_cut_off_before_its_time(tree: Path) -> None:
    folder = tree / "docs" / "benchmarks" / "gpu"
    assert run([measurement("first")]) == 0
    (tree / "code.py").write_text("first = 2\n")
    slow = measurement("first", "import time; time.sleep(600)", most=600)
    assert run_with_one_second_left(tree, slow) == 1
    assert stored(folder)["first"]["outcome"] == "done"
    assert run_with_one_second_left(tree, slow) == 1, "it is tried again"
    assert run([measurement("first", "raise SystemExit('never')")]) == 1
    assert stored(folder)["first"]["outcome"] == "failed"


def test_a_device_that_goes_away_leaves_no_result_and_ends_the_tool(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    looks = iter([MACHINE, "no GPU can be used: it has fallen off the bus"])
    measurements = [
        measurement("first"),
        measurement("second", "raise SystemExit('unspecified launch failure')"),
        measurement("third"),
    ]
    assert run(measurements, look=lambda: next(looks)) == 1
    assert set(stored(tree / "docs" / "benchmarks" / "gpu")) == {"first"}
    printed = capsys.readouterr().out
    assert "its result does not count: no GPU can be used: it has fallen off the bus" in printed
    assert "left: second, third; without a result: second" in printed
    assert run(measurements) == 1, "there again, it continues"
    assert set(stored(tree / "docs" / "benchmarks" / "gpu")) == {"first", "second", "third"}


def test_without_a_gpu_nothing_is_measured_and_the_page_is_made_anew(
    tree: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tree / "log"
    measurements = [measurement("first", logs(log, "first"))]
    assert run(measurements) == 0
    (tree / "docs" / "benchmarks" / "gpu.md").write_text(PAGE)
    assert run(measurements, look=lambda: "no GPU here: torch sees no CUDA device") == 0
    assert capsys.readouterr().out.count("no GPU here: torch sees no CUDA device; nothing is measured\n") == 1
    assert "| First | done |" in (tree / "docs" / "benchmarks" / "gpu.md").read_text()
    assert log.read_text() == "first\n"


def test_new_results_go_to_the_folder_out_and_the_page_has_all(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run([measurement("first")]) == 0
    monkeypatch.setenv("OUT", str(tree / "out"))
    assert run([measurement("first"), measurement("second")]) == 0
    assert set(stored(tree / "out" / "gpu")) == {"second"}
    page = (tree / "out" / "gpu.md").read_text()
    assert "| First | done |" in page
    assert "| Second | done |" in page
    assert "Second" not in (tree / "docs" / "benchmarks" / "gpu.md").read_text()


def test_a_measurement_ends_with_all_that_it_started(tree: Path) -> None:
    started = tree / "started"
    code = (
        "import subprocess, sys; "
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        f"open({str(started)!r}, 'w').write(str(child.pid)); {PRINTS}"
    )
    assert run([measurement("leaves", code)]) == 0
    assert ended(int(started.read_text()))


def ended(number: int) -> bool:
    """Wait until a process has ended."""
    try:
        psutil.Process(number).wait(60)
    except (psutil.NoSuchProcess, ChildProcessError):
        return True
    except psutil.TimeoutExpired:
        return False
    return True


KILLED = """
import sys
sys.path[:0] = [sys.argv[1]]
import gpu
begin = "import os, sys, time; open(sys.argv[1], 'a').write(f'{sys.argv[2]} {os.getpid()}\\\\n'); "
def one(name, code):
    command = ("-c", begin + code + "print('{}')", sys.argv[2], name)
    return gpu.Measurement(name, name, 0, 600, command, command, ("tools/gpu.py",), ())
names = ("first", "second", "third")
sys.exit(gpu.main(["--dry-run"], [one(name, sys.argv[4] if name == sys.argv[3] else "") for name in names]))
"""


NAMES = ["first", "second", "third"]


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("name", NAMES)
def test_killed_and_started_again_it_goes_on(name: str, tmp_path: Path) -> None:
    log, before = tmp_path / "log", NAMES[: NAMES.index(name)]
    command = [sys.executable, "-c", KILLED, str(TOOLS), str(log), name]
    environment = os.environ | {"OUT": str(tmp_path), "CIFAR10": "somewhere"}

    def noted() -> list[list[str]]:
        return [line.split() for line in log.read_text().splitlines()] if log.exists() else []

    with subprocess.Popen([*command, "time.sleep(600); "], env=environment, stdout=subprocess.DEVNULL) as tool:
        while len(noted()) <= len(before):
            assert tool.poll() is None
            time.sleep(0.01)
        tool.send_signal(signal.SIGKILL)
    assert ended(int(noted()[-1][1])), "what it was measuring has ended with it"
    assert sorted(stored(tmp_path / "dry-run" / "gpu")) == before
    done = subprocess.run([*command, ""], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    rest = NAMES[len(before) :]
    assert f"to take in 40 minutes: {', '.join(rest)}" in done.stdout
    assert [each for each, _ in noted()] == [*before, name, *rest]
    assert set(stored(tmp_path / "dry-run" / "gpu")) == set(NAMES)


def test_a_page_without_its_marks_is_refused() -> None:
    with pytest.raises(SystemExit, match="has no lines '<!-- measured: tools"):
        gpu.page("# On a GPU\n", {}, gpu.MEASUREMENTS)


def test_the_page_shows_the_results_that_are_there() -> None:
    docs = ROOT / "docs" / "benchmarks"
    text = (docs / "gpu.md").read_text()
    assert gpu.page(text, session.read([docs / "gpu"]), gpu.MEASUREMENTS) == text, "python tools/gpu.py --minutes 0"


def test_the_hash_of_code_is_of_names_and_contents(tree: Path) -> None:
    folder = tree / "package"
    folder.mkdir()
    (folder / "one.py").write_text("1")
    before = session.code_of(("package", "code.py"))
    (folder / "one.pyc").write_text("2")
    assert session.code_of(("package/one.py", "code.py", "package")) == before
    (folder / "one.py").rename(folder / "two.py")
    assert session.code_of(("package", "code.py")) != before
    with pytest.raises(FileNotFoundError, match="there is no nothing in"):
        session.code_of(("nothing",))


@pytest.mark.parametrize("each", gpu.MEASUREMENTS, ids=lambda each: each.name)
def test_every_measurement_names_files_that_there_are(each: Any) -> None:
    for command in (each.command, each.quick):
        files = [word for word in command if word.endswith(".py")]
        assert files
        for file in files:
            assert (ROOT / file).is_file()
            assert file.startswith("tools/") or session.code_of((*each.code, file)) == session.code_of(each.code), (
                "it counts"
            )
    assert each.least < each.most


def test_every_file_with_tests_on_a_gpu_is_in_a_measurement() -> None:
    marked = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py") if "mark.gpu" in path.read_text()}
    named = {word for each in gpu.MEASUREMENTS for word in each.command if word.startswith("tests/")}
    assert marked - {"tests/test_gpu_command.py"} == named


def test_pictures_of_the_shape_of_cifar_10_stand_in_for_it(tmp_path: Path) -> None:
    import numpy as np

    with np.load(gpu.write_pictures(tmp_path)) as found:
        shapes = {name: (found[name].shape, str(found[name].dtype)) for name in found.files}
    assert shapes == {
        "x_train": ((5000, 32, 32, 3), "uint8"),
        "y_train": ((5000,), "uint8"),
        "x_test": ((1000, 32, 32, 3), "uint8"),
        "y_test": ((1000,), "uint8"),
    }


def test_tests_are_counted(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\npytestmark = pytest.mark.gpu\ndef test_good(): pass\ndef test_bad(): assert 0\n"
        "@pytest.mark.skip\ndef test_left_out(): pass\n@pytest.fixture\ndef broken(): raise ValueError\n"
        "def test_of_broken(broken): pass\n"
    )
    command = [sys.executable, TOOLS / "gpu_tests.py", "test_some.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "passed": 1, "failed": 2, "skipped": 1, "missed": ["test_some.py::test_bad", "test_some.py::test_of_broken"],
    }  # fmt: skip
