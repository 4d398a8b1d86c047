"""A second study of the same models finds in the job history what the first one measured."""

from pathlib import Path

import tasks
from plain import check_equal, check_plain, curves, jobs, tune

import shoal
from shoal.core.job import Purpose

SPACE = {"lr": shoal.grid([0.01, 0.03, 0.1]), "width": shoal.choice([6, 8])}


def purposes(study: shoal.Study) -> set[Purpose]:
    return {job.purpose for job in jobs(study.directory)}


def test_a_second_study_measures_only_the_models_that_are_new(tmp_path: Path) -> None:
    first = tune(tasks.Blobs(), SPACE, tmp_path / "first", backend="local", devices="cpu:2")
    second = tune(tasks.Blobs(), SPACE, tmp_path / "second", devices="cpu:2")

    assert Purpose.PROFILE in purposes(first)
    assert Purpose.PROFILE not in purposes(second)
    assert Purpose.TRAIN in purposes(second)
    check_plain(first, tasks.Blobs())
    check_equal(curves(second.directory), curves(first.directory))

    wider = {"lr": shoal.grid([0.01, 0.03]), "width": shoal.choice([6, 8, 10])}
    third = tune(tasks.Blobs(), wider, tmp_path / "third", devices="cpu:2")
    widths = {row.number: row.config["width"] for row in third.trials}
    measured = [job for job in jobs(third.directory) if job.purpose is Purpose.PROFILE]
    assert {widths[number] for job in measured for number in job.trials} == {10}
