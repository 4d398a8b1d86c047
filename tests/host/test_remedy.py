"""Commands that messages name can be given to a shell as they are."""

from pathlib import Path

from shoal.host.remedy import command, resume_remedy


def test_the_directory_is_quoted_where_it_must_be() -> None:
    assert command("resume", Path("runs/one")) == "shoal resume runs/one"
    assert command("resume", Path("my runs/$one"), "--devices ...") == "shoal resume 'my runs/$one' --devices ..."


def test_to_mend_is_to_edit_which_resume_has_to_be_told() -> None:
    again = "shoal resume 'my runs' --accept-changes"
    assert resume_remedy(Path("my runs"), kept=False) == f"Fix the cause, then resume with: {again}"
    failed = resume_remedy(Path("my runs"), kept=False, lost=True)
    assert failed == f"Fix the cause, then resume with: shoal trial retry 'my runs' --failed, and then {again}"


def test_a_study_that_keeps_its_task_is_begun_anew() -> None:
    kept = resume_remedy(Path("runs"), kept=True)
    assert "fix it and begin a new study" in kept
    assert kept.endswith("fix it and resume with: shoal resume runs --accept-changes")
