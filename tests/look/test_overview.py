"""What a report says is what the journal says."""

import json
from dataclasses import replace

import pytest
from report_samples import device, row
from support.recorded import RecordedJournal
from timeline_samples import GB, Clock, machines, pretend, training, trial

from shoal.core.demand import Demand
from shoal.core.job import Purpose
from shoal.core.rows import JobRow, Run
from shoal.core.trial import Budget, Report, Trial, TrialGroup, TrialState, numbers_text
from shoal.journal.view import JournalView
from shoal.look.elapsed import Elapsed
from shoal.look.overview import Usage, overview, overview_json, structure_names, usage_text
from shoal.look.text import key_text, structure_text
from shoal.spec import StudySpec

HALF = Demand(0.5, 10 * GB, 1.0, 10.0)


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def journal(tmp_path, clock):
    study = StudySpec(metric="accuracy", mode="max")
    with RecordedJournal.create(tmp_path / "a <study>", study, task=b"", algorithm=b"", clock=clock) as journal:
        journal.record_devices(machines(2))
        journal.record_proposal(9, [TrialGroup(tuple(map(trial, range(8))), Budget(3))])
        yield journal


@pytest.mark.parametrize(
    ("last", "now", "expected", "resumes", "total"),
    [
        pytest.param(20.0, 30.0, {10.0: 0.0, 25.0: 15.0}, [], 20.0, id="one run that continues"),
        pytest.param(20.0, None, {20.0: 10.0}, [], 10.0, id="one run that has ended"),
        pytest.param(None, None, {}, [], 1e-3, id="nothing has happened"),
    ],
)
def test_time_of_one_run(last, now, expected, resumes, total):
    elapsed = Elapsed([Run(1, 10.0, 0)], last, now)
    assert {moment: elapsed(moment) for moment in expected} == expected
    assert (elapsed.resumes, elapsed.total) == (resumes, total)


def test_time_in_which_nobody_ran_it_does_not_count():
    runs = [Run(1, 10.0, 0), Run(2, 100.0, 0, 30.0), Run(3, 200.0, 0, 100.5)]
    elapsed = Elapsed(runs, 210.0, 211.0)
    assert [elapsed(moment) for moment in (10.0, 30.0, 60.0, 100.0, 100.5, 150.0, 210.0)] == [
        *(0.0, 20.0, 20.0, 20.0, 20.5, 20.5, 30.5)
    ]
    assert (elapsed.resumes, elapsed.total) == ([20.0, 20.5], 31.5)
    runs = [Run(1, 10.0, 0), Run(2, 100.0, 0, 15.0), Run(3, 200.0, 0, 15.0)]
    assert Elapsed(runs, 15.0, None).resumes == [5.0, 5.0]  # a run in which nothing happened has no length


def test_what_was_measured_on_gpus_is_shown(journal, clock):
    """A row counts until the next one, the last one to the end; the seconds in which nothing was known do not."""
    clock.now = 1010.0
    journal.record_telemetry({"cuda:0": (80, 2 * GB), "cuda:1": (None, GB)})
    clock.now = 1020.0
    journal.record_telemetry({"cuda:0": (None, 3 * GB)})
    clock.now = 1030.0
    journal.record_telemetry({"cuda:0": (20, GB)})
    seen = overview(journal, 1060.0)
    assert [(each.kernels, each.memory) for each in seen.usage] == [(pytest.approx(0.35), 3 * GB), (None, GB)]
    assert [(each["kernels"], each["memory_in_use"]) for each in overview_json(seen)["devices"]] == [
        (pytest.approx(0.35), 3 * GB),
        (None, GB),
    ]


def test_nothing_is_said_of_gpus_that_were_not_measured(journal):
    seen = overview(journal, 1060.0)
    assert {(each.kernels, each.memory) for each in seen.usage} == {(None, None)}


def test_what_became_of_the_time_of_a_device(journal, clock):
    clock.now = 1010.0
    journal.record_job_start(replace(training("1", [0], demand=HALF), purpose=Purpose.PROFILE), "cuda:0")
    journal.record_job_start(training("2", [0, 1], demand=HALF), "cuda:0")
    clock.now = 1020.0
    journal.record_job_end("1", "finished", failed=False)
    clock.now = 1030.0
    journal.record_reservations({"2": replace(HALF, compute=0.25)})
    clock.now = 1040.0
    journal.record_job_end("2", "crashed", failed=True)
    journal.record_job_start(training("3", [2]), "cuda:1")  # of which nothing is known
    seen = overview(journal, 1050.0)
    first, second = seen.usage
    assert seen.elapsed.total == 50.0
    assert first.busy == pytest.approx(30 / 50)
    assert first.occupancy == pytest.approx((10 * 1.0 + 10 * 0.5 + 10 * 0.25) / 50)
    assert first.seconds == {Purpose.PROFILE: 5.0, Purpose.TRAIN: 25.0}
    assert (first.jobs, first.failed) == (2, 1)
    assert (second.busy, second.occupancy, second.seconds) == (0.2, 0.2, {Purpose.TRAIN: 10.0})
    assert [(bar.job.id, bar.begin, bar.end) for bar in seen.bars] == [
        *(("1", 10.0, 20.0), ("2", 10.0, 40.0), ("3", 40.0, 50.0))
    ]
    assert [job.id for job in seen.failures] == ["2"]
    assert [failing.trial.number for failing in seen.state.failing] == [0, 1]


def test_the_best_value_over_time_is_that_of_the_best_trial(journal, clock):
    journal.record_job_start(training("1", range(4)), "cuda:0")
    for number, value in enumerate([0.5, float("nan"), 0.25, 0.75]):
        clock.now += 1.0
        journal.record_reports("1", [Report(number, 1, {"accuracy": value, "other": 9.0}, 1.0)])
    clock.now += 1.0
    journal.record_reports("1", [Report(3, 2, state=TrialState.FAILED, reason="its loss is NaN")])
    seen = overview(journal, clock.now)
    assert seen.curve == ((1.0, 0.5), (4.0, 0.75), (5.0, 0.5))  # the best trial has failed
    assert seen.state.best.value == 0.5
    assert [row.number for row in seen.best] == [0, 2]
    assert [(row.number, row.reason) for row in seen.failed_trials] == [(3, "its loss is NaN")]


def test_devices_that_only_an_earlier_run_had_are_told_of(journal, clock):
    clock.now = 1010.0
    journal.record_job_start(training("1", [0]), "cuda:1")
    journal.close()
    clock.now = 2000.0
    with RecordedJournal.open(journal.directory, clock=clock) as again:
        again.begin_run()
        again.requeue_running()
        again.record_devices(machines(1))
        seen = overview(again, 2001.0)
    assert [usage.device.name for usage in seen.usage] == ["cuda:1", "cuda:0"]
    assert (seen.bars[0].end, seen.elapsed.total, seen.failures) == (10.0, 11.0, [])


def test_as_json(tmp_path):
    pretend(tmp_path, devices=2, jobs=20, failing=0.3).close()
    with JournalView.read(tmp_path) as view:
        shown = json.loads(json.dumps(overview_json(overview(view, 5000.0)), allow_nan=False))
    assert shown["jobs"] == 24
    assert [device["device"] for device in shown["devices"]] == ["cuda:0", "cuda:1"]
    assert sum(device["failed"] for device in shown["devices"]) == len(shown["failures"]) > 0
    assert {failure["log"] for failure in shown["failures"]} == {f"logs/{f['job']}.log" for f in shown["failures"]}
    assert shown["failing"][0]["next"].startswith("trial ")
    assert [point["value"] for point in shown["curve"]] == sorted(point["value"] for point in shown["curve"])


def training_job(members):
    return JobRow("1", Purpose.TRAIN, "cpu:0", (), 1.0, None, "", "", None, members)


WIDE = {
    number: {"lr": number / 10, "net": {"width": 64 if number < 2 else 128}, "batch_size": 32} for number in range(4)
}
DIGESTS = [f"{letter * 16} x 32" for letter in "abcd"]


@pytest.mark.parametrize(
    ("jobs", "configs", "names"),
    [
        pytest.param(
            [training_job({DIGESTS[0]: (0, 1), DIGESTS[1]: (2, 3)})],
            WIDE,
            ["net.width=64", "net.width=128"],
            id="a parameter",
        ),
        pytest.param(
            [training_job({DIGESTS[0]: (0,), DIGESTS[1]: (2,)})],
            WIDE,
            ["net.width=64 lr=0", "net.width=128 lr=0.2"],
            id="a trial each: floats last",
        ),
        pytest.param([training_job({DIGESTS[0]: (0, 2)})], WIDE, ["batches of 32"], id="one alone"),
        pytest.param(
            [training_job({"a x 8": (0, 1), "b x 16": (2, 3)})],
            WIDE,
            ["net.width=64, batches of 8", "net.width=128, batches of 16"],
            id="another batch size that is not a parameter",
        ),
        pytest.param(
            [training_job(dict.fromkeys(DIGESTS[:2], ()))],
            WIDE,
            ["aaaaaaaa, batches of 32", "bbbbbbbb, batches of 32"],
            id="not known",
        ),
        pytest.param(
            [training_job({DIGESTS[0]: (0, 1), DIGESTS[1]: (2,), DIGESTS[2]: (2,)})],
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


@pytest.mark.parametrize(
    ("measured", "text"),
    [
        pytest.param({}, "what jobs used of it was not measured", id="CPU"),
        pytest.param({"kernels": 0.25}, "measured: kernels ran 25% of the time", id="kernels"),
        pytest.param(
            {"kernels": 0.0, "memory": 3 * 10**9},
            "measured: kernels ran 0% of the time, at most 3.0 GB in use",
            id="kernels and memory",
        ),
    ],
)
def test_the_use_of_a_device_tells_what_was_planned_from_what_was_measured(measured, text):
    found = Usage(device("cpu:0"), 1.0, 0.551, {}, 2, 0, **measured)
    planned = "had a job 100% of the time, with 55% of its compute reserved on average"
    assert usage_text(found) == f"{planned}; {text}"
