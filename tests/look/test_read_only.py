"""What the command line says of a study to somebody who may only read it."""

import ctypes
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from timeline_samples import pretend, trial

from shoal.core.trial import Budget, Report, TrialGroup, TrialState

SHOAL = [sys.executable, "-c", "from shoal.__main__ import main; main()"]
DROP, RIGHTS = 24, (1, 2)  # PR_CAPBSET_DROP, CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH of Linux
Look = Callable[..., tuple[int, str]]


def give_up_rights() -> None:
    """Permissions are to count for the superuser too."""
    for right in RIGHTS:
        ctypes.CDLL(None).prctl(DROP, right)


@pytest.fixture
def look(tmp_path: Path) -> Look:
    """Runs a command beside the directory `study`, of which some folder may not be used as usual."""
    study = tmp_path / "study"
    with pretend(study, devices=1, jobs=2) as journal:
        journal.record_proposal(1, [TrialGroup((trial(99),), Budget(3))])
        journal.record_reports("", [Report(99, 0, state=TrialState.FAILED, reason="as the test says")])
    (study / "requests").mkdir()

    def run(*arguments: str, folder: str = "", mode: int = 0o555) -> tuple[int, str]:
        (study / folder).chmod(mode)
        done = subprocess.run(
            [*SHOAL, *arguments], cwd=tmp_path, capture_output=True, text=True, check=False, preexec_fn=give_up_rights
        )
        (study / folder).chmod(0o755)
        return done.returncode, done.stderr

    return run


def test_a_report_is_written_below_the_working_directory(look: Look) -> None:
    status, said = look("report", "study")
    assert status == 0, said
    assert "study/report cannot be written; the report is written below the working directory" in said
    assert "written: study-report/report.html" in said


def test_status_says_that_going_on_needs_write_access(look: Look) -> None:
    status, said = look("status", "study")
    assert status == 0, said
    assert "resume it with: shoal resume study (as a user with write permission)" in said


def test_status_says_which_folder_may_not_be_read(look: Look) -> None:
    status, said = look("status", "study", folder="requests", mode=0o000)
    assert status == 1
    assert "study/requests (Permission denied); ask its owner for permission to read its files" in said


def test_trials_cannot_be_retried(look: Look) -> None:
    status, said = look("trial", "retry", "study", "--failed", folder="requests")
    assert status == 1
    assert " cannot take a request, because /" in said
    assert "/study/requests cannot be written; ask its owner" in said
