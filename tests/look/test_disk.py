"""The warning that the disk of a running study is nearly full."""

import errno
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shoal.journal.view import JournalView
from shoal.look.disk import DiskWatch, nearly_full_text

USAGE = namedtuple("USAGE", "total used free")
GB = 10**9
FEWER = "shoal keep runs/a 5 deletes the weights of ended trials but the best 5"
ELSEWHERE = "delete other files on it, or stop the study and move its directory to another disk"


class _Journal(SimpleNamespace):
    keep = JournalView.keep


def _journal(rule: int | str = "all", **changed: int | str) -> Any:
    return _Journal(directory=Path("runs/a"), spec=SimpleNamespace(keep=rule), study=changed)


@pytest.mark.parametrize(
    ("free", "warned"),
    [
        pytest.param([50, 11, 10], [], id="enough"),
        pytest.param([50, 9, 8], [1], id="when it becomes so"),
        pytest.param([9, 5, 4, 3, 1, 0, 0], [0, 2, 4, 5], id="again when less than half is left"),
        pytest.param([9, 50, 9], [0], id="not again"),
        *(
            pytest.param([OSError(number, "gone for a moment"), 9], [1], id=errno.errorcode[number])
            for number in (errno.ENOENT, errno.ESTALE, errno.EIO, errno.EACCES, errno.ENOTCONN)
        ),
    ],
)
def test_it_warns(free: list[int | OSError], warned: list[int], caplog: pytest.LogCaptureFixture) -> None:
    now, left = [0.0], iter(free)

    def find(path: Path) -> USAGE:
        value = next(left)
        if isinstance(value, OSError):
            raise value
        return USAGE(100 * GB, 0, value * GB)

    watch, found = DiskWatch(_journal(), find, lambda: now[0]), []
    for turn in range(len(free)):
        caplog.clear()
        watch.update()
        found += [turn] if "the disk is nearly full" in caplog.text else []
        now[0] += 10
    assert found == warned


def test_it_looks_every_ten_seconds() -> None:
    now, asked = [0.0], []

    def find(path: Path) -> USAGE:
        asked.append(now[0])
        return USAGE(100, 50, 50)

    watch = DiskWatch(_journal(), find, lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        watch.update()
    assert asked == [0.0, 10.0, 20.0]


@pytest.mark.parametrize(
    ("total", "free", "warns"),
    [(100, 9, True), (100, 10, False), (20_000, 1_900, False), (20_000, 19, True), (20_000, 20, False)],
)
def test_it_is_nearly_full_below_a_tenth_and_20_gb(total: int, free: int, warns: bool) -> None:
    assert (nearly_full_text(_journal(), USAGE(total * GB, 0, free * GB)) is not None) is warns


@pytest.mark.parametrize(
    ("journal", "remedy"),
    [
        *((_journal(rule), FEWER) for rule in ("all", 6)),
        *((_journal(rule), ELSEWHERE) for rule in ("best", 1, 5)),
        (_journal("all", keep=5), ELSEWHERE),
        (_journal("best", keep="all"), FEWER),
    ],
)
def test_the_remedy_keeps_fewer_weights_than_the_rule_of_the_study(journal: Any, remedy: str) -> None:
    text = nearly_full_text(journal, USAGE(100 * GB, 91 * GB, 9 * GB))
    assert text == f"the disk is nearly full, 9.0 GB free of 100.0 GB; {remedy}"
