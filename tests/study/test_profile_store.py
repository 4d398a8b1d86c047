"""What is kept of a profile when its key is measured anew, and what company teaches."""

from dataclasses import replace
from pathlib import Path

import pytest
from planner_samples import FUSES, GB, A

from shoal.core.array import Array, Member
from shoal.core.device import Device
from shoal.core.event import Profiled
from shoal.core.job import Job, Purpose
from shoal.core.trial import Trial
from shoal.cost.catalogue import records
from shoal.cost.history import History
from shoal.study.profile_store import ProfileStore

KNOWN = replace(
    FUSES, member_memory=3 * GB, compiled_gain={4: 2.0}, compile_seconds=5.0, crowding={2: 1.5}, fused_gain={4: 1.1}
)
FOUND = replace(FUSES, step_seconds={1: 2.0, 4: 3.0}, compiled_gain={8: 1.5}, fused_gain={16: 4.0})


def job(*numbers: int, purpose: Purpose = Purpose.PROFILE) -> Job:
    return Job("one", (Array(A, tuple(member(number, lr=number / 10, width=64) for number in numbers)),), purpose)


def member(number: int, **config: object) -> Member:
    return Member(Trial(number, config, 0, 0), 0, 3)


H200 = Device("cuda:0", "H200", 141 * GB)
PROFILE, TRAIN = job(0, 1), job(0, 1, purpose=Purpose.TRAIN)


@pytest.fixture
def lessons(tmp_path: Path) -> ProfileStore:
    return ProfileStore(History(tmp_path / "history.sqlite"))


def test_what_only_training_jobs_show_outlasts_a_measurement(lessons: ProfileStore) -> None:
    lessons.learn(Profiled("one", A, KNOWN), PROFILE, H200)
    lessons.learn(Profiled("two", A, FOUND), PROFILE, H200)
    assert lessons.profile(A, "H200") == replace(
        FOUND, member_memory=3 * GB, compiled_gain={4: 2.0, 8: 1.5}, compile_seconds=5.0, crowding={2: 1.5}
    )


def test_a_training_job_adds_to_what_was_measured(lessons: ProfileStore) -> None:
    lessons.learn(Profiled("one", A, KNOWN), PROFILE, H200)
    lessons.learn(Profiled("two", A, FOUND), TRAIN, H200)
    assert lessons.profile(A, "H200") == replace(KNOWN, compiled_gain={4: 2.0, 8: 1.5}, fused_gain={4: 1.1, 16: 4.0})


def test_company_is_learnt_once(lessons: ProfileStore) -> None:
    lessons.crowded(A, "H200", 2, 1.5)
    assert (lessons.profile(A, "H200"), lessons.learnt) == (None, 0), "nothing is known of the key yet"
    lessons.learn(Profiled("one", A, FUSES), PROFILE, H200)
    for _ in range(3):
        lessons.crowded(A, "H200", 2, 1.5)
    assert lessons.profile(A, "H200") == replace(FUSES, crowding={2: 1.5})
    assert lessons.learnt == 2


def test_where_a_structure_came_from_is_kept_across_studies(tmp_path: Path) -> None:
    path = tmp_path / "history.sqlite"
    ProfileStore(History(path), "Digits").learn(Profiled("one", A, FUSES), job(3), H200)
    assert [record.origins for record in records(path)] == [{"Digits": {"lr": 0.3, "width": 64}}]
    ProfileStore(History(path), "Digits").learn(Profiled("one", A, FUSES), job(3, 4), H200)
    ProfileStore(History(path), "Letters").learn(Profiled("one", A, FUSES), job(3, 4), H200)
    assert [record.origins for record in records(path)] == [{"Digits": {"width": 64}, "Letters": {"width": 64}}]
