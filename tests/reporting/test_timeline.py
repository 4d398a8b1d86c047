"""What is drawn of a study."""

from dataclasses import replace

import pytest
from report_samples import row
from timeline_samples import Clock, machines, pretend

from shoal.core.errors import ShoalError
from shoal.core.job import Purpose
from shoal.core.trial import Trial
from shoal.journal.rows import JobRow
from shoal.journal.statistics import StudyStatistics
from shoal.journal.writer import Journal
from shoal.reporting.overview import overview, structure_names
from shoal.reporting.text import key_text, numbers_text, structure_text
from shoal.reporting.timeline import TimelineBar, axis_limit, draw_timeline, merge_thin_bars


def drawn(journal, path, now=None):
    draw_timeline(
        overview(journal, max(StudyStatistics(journal).moments(), default=1000.0) if now is None else now), path
    )
    return path


def test_the_timeline_names_what_it_shows(tmp_path):
    with pretend(tmp_path / "my $tudy", devices=2, jobs=30, failing=0.2, side_by_side=2) as journal:
        text = drawn(journal, tmp_path / "timeline.svg").read_text()
        structure = next(job.keys[0] for job in journal.jobs() if job.keys)
    named = [
        "best accuracy",
        "cuda:0",
        "NVIDIA H200",
        "reserved",
        "used",
        "failed",
        "several structures",
        "looks at models",
    ]
    for part in (*named, "measures", "minutes", f"{structure[:8]}, batches of 32"):
        assert f"<!-- {part}" in text, part
    assert "tudy: 34 jobs in 0:0" in text
    assert "<!-- trials " in text


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"devices": 1, "jobs": 0}, id="nothing is trained yet"),
        pytest.param({"devices": 3, "jobs": 12, "running": True}, id="it runs"),
        pytest.param({"devices": 64, "jobs": 300, "side_by_side": 2, "structures": 12}, id="many devices"),
        pytest.param({"devices": 1, "jobs": 40, "side_by_side": 16, "failing": 0.5}, id="many at once"),
    ],
)
def test_studies_of_all_sizes_can_be_drawn(changes, tmp_path):
    with pretend(tmp_path / "study", **changes) as journal:
        path = drawn(journal, tmp_path / "timeline.png")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_study_in_which_nothing_has_happened(tmp_path):
    study = {"metric": "a metric with quite a long name", "mode": "min"}
    with Journal.create(tmp_path, study, task=b"", algorithm=b"", clock=Clock()) as journal:
        text = drawn(journal, tmp_path / "nothing.svg").read_text()
        assert "<!-- no value yet" in text
        journal.record_devices(machines(1))
        assert "<!-- cuda:0" in drawn(journal, tmp_path / "timeline.svg").read_text()


def test_a_study_that_was_gone_on_with(tmp_path):
    pretend(tmp_path / "study", devices=1, jobs=3, running=True).close()
    clock = Clock()
    clock.now = 90_000.0
    with Journal.open(tmp_path / "study", clock=clock) as again:
        again.begin_run()
        again.requeue_running()
        text = drawn(again, tmp_path / "timeline.svg", 90_001.0).read_text()
    assert "resumed at the dashed lines" in text


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with (
        pretend(tmp_path / "study", devices=1, jobs=1) as journal,
        pytest.raises(ShoalError, match=r"the timeline cannot be written: .*nowhere"),
    ):
        drawn(journal, tmp_path / "nowhere" / "timeline.png")


def piece(begin, end, colour="#000000", jobs=1, label=("trial 1",)):
    return TimelineBar(begin, end, colour, False, jobs, label)


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        pytest.param([], [], id="none"),
        pytest.param([piece(0, 5), piece(5, 9)], [piece(0, 5), piece(5, 9)], id="wide"),
        pytest.param([piece(0, 1), piece(1, 3)], [piece(0, 3, jobs=2, label=())], id="thin and touching"),
        pytest.param([piece(0, 1), piece(3, 4)], [piece(0, 1), piece(3, 4)], id="thin and apart"),
        pytest.param([piece(0, 5), piece(5, 6), piece(6, 11)], [piece(0, 5), piece(5, 6), piece(6, 11)], id="between"),
        pytest.param(
            [piece(0, 1, "#111111"), piece(1, 2.5, "#222222"), piece(2.5, 3, "#333333"), piece(3, 4)],
            [piece(0, 3, "#222222", 3, ()), piece(3, 4)],
            id="the longest gives the colour, and a piece has its full length at that of a thin one",
        ),
    ],
)
def test_what_is_too_thin_is_drawn_together(pieces, expected):
    assert merge_thin_bars(pieces, 3.0) == expected


@pytest.mark.parametrize(
    ("values", "end"),
    [
        pytest.param([], None, id="nothing"),
        pytest.param([1e9, 0.5], None, id="too few"),
        pytest.param([0.65, 0.78, 0.83, 0.85, 0.93], None, id="as they come"),
        pytest.param([1e9, 2.5, 0.5], 0.5 + 1.3 * 2, id="a bad first loss"),
        pytest.param([-40.0, 0.5, 0.75], 0.75 - 1.3 * 0.25, id="a bad first score"),
        pytest.param([1e308, -1e308, -1.5e308], None, id="the widest range"),
    ],
)
def test_a_bad_first_value_does_not_flatten_the_others(values, end):
    assert axis_limit(values) == (end if end is None else pytest.approx(end))


def test_a_value_beyond_the_axis_is_told(tmp_path):
    with pretend(tmp_path / "study", devices=1, jobs=9) as journal:
        known = overview(journal, 2000.0)
    curve = ((1.0, -4e9), (5.0, 0.5), (9.0, 0.75))
    draw_timeline(replace(known, curve=curve), tmp_path / "timeline.svg")
    assert "<!-- beyond the axis: -4e9" in (tmp_path / "timeline.svg").read_text()


def job(keys, members=None, trials=()):
    return JobRow("1", Purpose.TRAIN, "cpu:0", trials, 1.0, None, "", "", tuple(keys), None, members or {})


WIDE = {
    number: {"lr": number / 10, "net": {"width": 64 if number < 2 else 128}, "batch_size": 32} for number in range(4)
}
DIGESTS = [f"{letter * 16} x 32" for letter in "abcd"]


@pytest.mark.parametrize(
    ("jobs", "configs", "names"),
    [
        pytest.param(
            [job(DIGESTS[:2], {DIGESTS[0]: (0, 1), DIGESTS[1]: (2, 3)})],
            WIDE,
            ["net.width=64", "net.width=128"],
            id="a parameter",
        ),
        pytest.param(
            [job(DIGESTS[:1], trials=(0, 1)), job(DIGESTS[1:2], trials=(2, 3))],
            WIDE,
            ["net.width=64", "net.width=128"],
            id="a journal of an older version",
        ),
        pytest.param(
            [job(DIGESTS[:2], {DIGESTS[0]: (0,), DIGESTS[1]: (2,)})],
            WIDE,
            ["net.width=64 lr=0", "net.width=128 lr=0.2"],
            id="a trial each: floats last",
        ),
        pytest.param([job(DIGESTS[:1], trials=(0, 2))], WIDE, ["batches of 32"], id="one alone"),
        pytest.param(
            [job(["a x 8", "b x 16"], {"a x 8": (0, 1), "b x 16": (2, 3)})],
            WIDE,
            ["net.width=64, batches of 8", "net.width=128, batches of 16"],
            id="another batch size that is not a parameter",
        ),
        pytest.param(
            [job(DIGESTS[:2], trials=(0, 1, 2))],
            WIDE,
            ["aaaaaaaa, batches of 32", "bbbbbbbb, batches of 32"],
            id="not known",
        ),
        pytest.param(
            [job(DIGESTS[:3], {DIGESTS[0]: (0, 1), DIGESTS[1]: (2,), DIGESTS[2]: (2,)})],
            {number: {"net": config["net"]} for number, config in WIDE.items()},
            ["net.width=64", "net.width=128 (bbbbbbbb, batches of 32)", "net.width=128 (cccccccc, batches of 32)"],
            id="parameters do not tell",
        ),
    ],
)
def test_structures_are_named_by_what_differs(jobs, configs, names):
    rows = [row(number, trial=Trial(number, config, 0, 0)) for number, config in configs.items()]
    assert list(structure_names(jobs, rows).values()) == names


@pytest.mark.parametrize(
    ("numbers", "text"), [([], ""), ([3], "3"), ([0, 1, 2], "0-2"), ([9, 1, 0, 4, 5, 7], "0-1, 4-5, 7, 9")]
)
def test_numbers_in_ranges(numbers, text):
    assert numbers_text(numbers) == text


def test_names_of_structures():
    assert structure_text("0123456789abcdef" * 2) == "01234567"
    assert structure_text("opaque train.py 0123456789abcdef") == "opaque train.py 01234567"
    assert key_text("0123456789abcdef x 64") == "01234567, batches of 64"
    assert key_text("a x b x 8") == "a x b, batches of 8"
