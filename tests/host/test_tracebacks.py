"""Errors that Shoal raises on purpose end at the user's line: in scripts, notebooks and logs."""

import logging
import runpy
import traceback
from pathlib import Path

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

UNPICKLABLE = """
class Mine(shoal.Task):
    data = model = optimizer = loss = None

    def __getstate__(self):
        raise ValueError("of the user")

shoal.tune(Mine(), {"lr": shoal.uniform(0, 1)}, metric="valid_loss", mode="min", trials=3, epochs=1)
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
    (folder / "script.py").write_text(script)
    with pytest.raises(Exception) as error:  # noqa: PT011
        runpy.run_path(str(folder / "script.py"), run_name="__main__")
    return error.value


def frames(error: BaseException) -> tuple[list[str], list[str]]:
    """Lines of the script in a traceback, and files of Shoal."""
    found = traceback.extract_tb(error.__traceback__)
    package = str(Path(shoal.__file__).parent)
    return (
        [str(each.line) for each in found if Path(each.filename).name == "script.py"],
        [Path(each.filename).name for each in found if each.filename.startswith(package)],
    )


@pytest.mark.parametrize(("script", "lines", "message"), CASES.values(), ids=CASES)
def test_script_ends_at_the_users_line(
    script: str, lines: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SHOAL_DEBUG", raising=False)
    error = raised(script, tmp_path, monkeypatch)
    of_user, ours = frames(error)
    assert [found.startswith(line) for found, line in zip(of_user, lines, strict=True)] == [True] * len(lines)
    assert message in str(error)
    assert ours == ["tracebacks.py"]


def test_debug_keeps_all_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_DEBUG", "1")
    _, ours = frames(raised(CASES["mode"][0], tmp_path, monkeypatch))
    assert "objective.py" in ours


def test_cause_in_code_of_the_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHOAL_DEBUG", raising=False)
    error = raised(BEGIN + UNPICKLABLE, tmp_path, monkeypatch)
    assert error.__cause__ is not None
    of_user, ours = frames(error.__cause__)
    assert (of_user[-1], ours) == ('raise ValueError("of the user")', [])


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
