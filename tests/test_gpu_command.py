"""`tools/gpu.py` runs its parts with budgets, goes on after one that fails, and says what came of each."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu", ROOT / "tools" / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu"] = module  # which dataclasses ask for
    spec.loader.exec_module(module)
    return module


gpu = loaded()
MACHINE = {
    "device": "NVIDIA H100", "devices": 1, "gib": 79.2, "driver": "580.1", "cuda": "13.0",
    "torch": "2.11.0", "python": "3.12.3",
}  # fmt: skip


def part(name: str, code: str, seconds: int = 10, needs: tuple[str, ...] = ()) -> Any:
    return gpu.Part(name, name.title(), seconds, ("-c", code), needs)


PARTS = (
    part("passes", "print('0.5 ms')"),
    part("fails", "print('before'); raise SystemExit('no such kernel')"),
    part("hangs", "import time; print('began', flush=True); time.sleep(600)"),
    part("lacks", "", needs=("no_such_module", "pynvml_of_nobody")),
    part("told", "print('at most {seconds} s')"),
)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CIFAR10", "somewhere")


@pytest.mark.usefixtures("no_pictures")
def test_a_part_that_fails_hangs_or_lacks_a_package_does_not_keep_the_others_from_running(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quick = [each if each.name != "hangs" else gpu.Part("hangs", "Hangs", 1, each.command, ()) for each in PARTS]
    status = gpu.main(["--output", str(tmp_path), "--minutes", "0.4"], quick, lambda: MACHINE)
    assert status == 1
    printed = capsys.readouterr().out
    assert "2 of 5 parts passed" in printed
    assert "fails: failed, exit status 1" in printed
    assert "hangs: cut off, not done in" in printed
    assert "lacks: not run, needs no_such_module, pynvml_of_nobody, not installed here" in printed
    page = (tmp_path / "gpu.md").read_text()
    assert "1 x NVIDIA H100, 79.2 GiB; driver 580.1, CUDA 13.0, torch 2.11.0, Python 3.12.3" in page
    assert "| Passes | passed |" in page
    assert "0.5 ms" in page
    assert "no such kernel" in page
    assert "began" in page, "what was printed before the end of the budget"
    assert "at most " in page
    assert "{seconds}" in page, "the command is shown as it stands in the list"
    assert "no such kernel" in (tmp_path / "gpu.log").read_text()


@pytest.mark.usefixtures("no_pictures")
def test_the_status_is_0_if_all_parts_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert gpu.main(["--parts", "passes"], PARTS, lambda: MACHINE) == 0
    assert "| Passes | passed |" in (tmp_path / "gpu.md").read_text()
    assert "Fails" not in (tmp_path / "gpu.md").read_text()


def test_without_a_gpu_there_is_nothing_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ran = part("runs", f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert gpu.main(["--output", str(tmp_path)], [ran], lambda: "no GPU here: torch sees no CUDA device") == 0
    assert capsys.readouterr().out == "no GPU here: torch sees no CUDA device; nothing to do\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("output", "outcome", "shown"),
    [
        pytest.param("....\n4 passed in 1.00s", "passed", [], id="passed"),
        pytest.param("ss\nSKIPPED [2] no MPS\n2 skipped in 1.00s", "skipped", ["SKIPPED [2] no MPS"], id="all skipped"),
        pytest.param(
            ".s\nSKIPPED [1] no MPS\n1 passed, 1 skipped in 1s", "passed", ["SKIPPED [1] no MPS"], id="some skipped"
        ),
    ],
)
def test_what_pytest_says_is_read(
    output: str, outcome: str, shown: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = gpu.Part("tests", "Tests", 9, ("-c", f"print({output!r})", "pytest"), ())
    with (tmp_path / "log").open("w") as log:
        result = gpu.run(tests, 9.0, log, {})
    assert (result.outcome, gpu._shown(result)) == (outcome, shown)


@pytest.mark.parametrize("each", gpu.PARTS, ids=lambda each: each.name)
def test_every_part_names_files_that_there_are(each: Any) -> None:
    files = [word for word in each.command if word.endswith(".py")]
    assert files
    for file in files:
        assert (ROOT / file).is_file()
        if each.is_test:
            assert "mark.gpu" in (ROOT / file).read_text(), "it has tests of that mark"


def test_every_file_with_tests_on_a_gpu_is_run_by_a_part() -> None:
    marked = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/**/test_*.py") if "mark.gpu" in path.read_text()}
    named = {word for each in gpu.PARTS for word in each.command if word.startswith("tests/")}
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
