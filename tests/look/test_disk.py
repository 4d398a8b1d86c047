"""The warning that the disk of a running study is nearly full."""

from collections import namedtuple
from pathlib import Path

import pytest

from shoal.look.disk import DiskWatch

USAGE = namedtuple("USAGE", "total used free")


@pytest.mark.parametrize(
    ("free", "warned"),
    [
        pytest.param([50, 11, 10], [], id="enough"),
        pytest.param([50, 9, 8], [1], id="once, when it becomes so"),
        pytest.param([9, 50, 9], [0], id="not again"),
        pytest.param([None, 9], [1], id="the directory is away for a moment"),
    ],
)
def test_it_warns_once(free: list[int | None], warned: list[int], caplog: pytest.LogCaptureFixture) -> None:
    now, left = [0.0], iter(free)

    def find(path: Path) -> USAGE:
        value = next(left)
        if value is None:
            raise FileNotFoundError(path)
        return USAGE(100 * 10**9, 0, value * 10**9)

    watch, found = DiskWatch(Path("runs/a"), find, lambda: now[0]), []
    for turn in range(len(free)):
        caplog.clear()
        watch.update()
        found += [turn] if "the disk is nearly full, 9.0 GB free of 100.0 GB; shoal keep" in caplog.text else []
        now[0] += 10
    assert found == warned


def test_it_looks_every_ten_seconds() -> None:
    now, asked = [0.0], []

    def find(path: Path) -> USAGE:
        asked.append(now[0])
        return USAGE(100, 50, 50)

    watch = DiskWatch(Path("runs/a"), find, lambda: now[0])
    for second in range(25):
        now[0] = float(second)
        watch.update()
    assert asked == [0.0, 10.0, 20.0]
