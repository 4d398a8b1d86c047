"""What all drawings share."""

import sys

import pytest

from shoal.core.errors import ShoalError
from shoal.reporting import drawing
from shoal.reporting.drawing import assign_lanes, check_drawing, save_figure
from shoal.simulate.result import Interval


def test_a_drawing_that_could_not_be_drawn_is_refused_before(tmp_path, monkeypatch):
    check_drawing(tmp_path / "plot.SVG", "a plot")
    with pytest.raises(ShoalError, match=r"a Gantt chart is a \.png or \.svg file, got chart.txt"):
        check_drawing((tmp_path / "chart.txt").relative_to(tmp_path), "a Gantt chart")
    with pytest.raises(ShoalError, match=r".*nowhere is not a writable folder"):
        check_drawing(tmp_path / "nowhere" / "plot.png", "a plot")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(drawing, "find_spec", lambda name: None)
    with pytest.raises(ShoalError, match=r"a plot needs matplotlib. Install it with: pip install matplotlib"):
        check_drawing(tmp_path / "plot.png", "a plot")


def test_a_drawing_that_cannot_be_saved_says_which(tmp_path):
    from matplotlib.figure import Figure

    with pytest.raises(ShoalError, match=r"the plot cannot be written: .*nowhere"):
        save_figure(Figure(), tmp_path / "nowhere" / "plot.png", "the plot")


def test_stays_on_one_device_do_not_cover_each_other():
    intervals = [
        Interval(name, 1, "gpu0", begin, end, 0.5) for name, begin, end in (("a", 0, 4), ("b", 2, 6), ("c", 4, 8))
    ]
    assert [(lane, count, stay.trial) for lane, count, stay in assign_lanes(intervals)] == [
        (0, 2, "a"),
        (1, 2, "b"),
        (0, 2, "c"),
    ]
