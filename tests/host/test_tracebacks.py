"""Errors that Shoal raises on purpose end at the user's line: in scripts, notebooks and logs."""

import logging
import runpy
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import shoal
from shoal.host.tracebacks import ends_at_call

BEGIN = "import shoal\n\n"
CALL = 'shoal.tune(print, {{"lr": {space}}}, metric="loss", mode={mode}, trials=3, epochs=1{more})\n'


def call(space: str = "shoal.uniform(0, 1)", mode: str = '"min"', more: str = "") -> str:
    return BEGIN + CALL.format(space=space, mode=mode, more=more)


OWN = """
class Mine(shoal.Random):
    @property
    def longest_budget(self):
        return shoal.Random(0, epochs=1)

shoal.tune(print, {"lr": shoal.uniform(0, 1)}, metric="loss", mode="min", algorithm=Mine(3, epochs=1))
"""

CASES: dict[str, tuple[str, list[str], str]] = {
    "mode": (call(mode='"mini"'), ["shoal.tune("], '`mode` must be "min" or "max", got \'mini\''),
    "space": (call(space="shoal.loguniform(-1, 1)"), ["shoal.tune("], "`lr`: low must be above 0"),
    "a value": (call(more=', policy="fiffo"'), ["shoal.tune("], "there is no policy 'fiffo' (did you mean 'fifo'?)"),
    "an argument": (call(more=', device="cpu"'), ["shoal.tune("], "no argument 'device' (did you mean 'devices'?)"),
    "a missing argument": (BEGIN + "shoal.tune(print, {})\n", ["shoal.tune("], "'metric' and 'mode'"),
    "resume": (BEGIN + 'shoal.resume("nothing")\n', ["shoal.resume("], "nothing"),
    "in a class of the user": (
        BEGIN + OWN,
        ["shoal.tune(", "return shoal.Random(0, epochs=1)"],
        "`n` must be",
    ),
}


def raised(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> BaseException:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    (folder / "script.py").write_text(script)
    with pytest.raises(Exception) as error:  # noqa: PT011
        runpy.run_path(str(folder / "script.py"), run_name="__main__")
    return error.value


def shown(error: BaseException, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Lines that Python prints of an uncaught error, from the script on."""
    sys.excepthook(type(error), error, error.__traceback__)
    text = capsys.readouterr().err
    return text[text.index("script.py") :].splitlines()


@pytest.mark.parametrize(("script", "lines", "message"), CASES.values(), ids=CASES)
def test_script_ends_at_the_users_line(
    script: str,
    lines: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("SHOAL_DEBUG", raising=False)
    printed = shown(raised(script, tmp_path, monkeypatch), capsys)
    code = [line.strip() for line in printed if line.startswith("    ") and not set(line) <= set(" ^~")]
    assert [found.startswith(line) for found, line in zip(code, lines, strict=True)] == [True] * len(lines)
    assert message in "\n".join(printed)
    assert str(Path(shoal.__file__).parent) not in "\n".join(printed)


def test_debug_keeps_all_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SHOAL_DEBUG", "1")
    printed = "\n".join(shown(raised(CASES["mode"][0], tmp_path, monkeypatch), capsys))
    assert "objective.py" in printed


def test_bug_keeps_all_frames() -> None:
    @ends_at_call
    def tune() -> None:
        len(3)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len") as error:
        tune()
    assert [frame.name for frame in traceback.extract_tb(error.value.__traceback__)][1:] == ["call", "tune"]


def test_log_has_the_callers_line_and_one_frame_of_ours(caplog: pytest.LogCaptureFixture) -> None:
    try:
        shoal.resume("")
    except shoal.ShoalError:
        logging.exception("it failed")
    files = [line for line in caplog.text.splitlines() if line.startswith("  File")]
    assert [Path(line.split('"')[1]).name for line in files] == ["test_tracebacks.py", "tracebacks.py"]


def test_hook_of_the_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    error = raised(CASES["mode"][0], tmp_path, monkeypatch)
    calls: list[BaseException] = []
    mine: Any = lambda kind, error, trace: calls.append(error)  # noqa: E731
    monkeypatch.setattr(sys, "excepthook", mine)
    for _ in range(2):
        with pytest.raises(shoal.ShoalError):
            shoal.resume("")
    sys.excepthook(type(error), error, error.__traceback__)
    assert calls == [error]


def test_notebook_ends_at_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def structured(kind: type, error: BaseException, trace: Any, tb_offset: int) -> list[str]:
        return [frame.name for frame in traceback.extract_tb(trace)][tb_offset - 1 :]

    shell = SimpleNamespace(InteractiveTB=SimpleNamespace(structured_traceback=structured))
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))  # type: ignore[arg-type]
    with pytest.raises(shoal.ShoalError) as error:
        shoal.resume("")
    rendered: Any = error.value
    assert rendered._render_traceback_() == ["test_notebook_ends_at_the_users_line"]
