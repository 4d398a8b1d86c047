"""`make wheel` builds what is released only under the version of its tag."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from shoal.core.version import VERSION

ROOT = Path(__file__).parents[1]


def test_the_newest_heading_of_the_changelog_is_the_version() -> None:
    assert re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == VERSION


@pytest.mark.parametrize(("tag", "status"), [(f"v{VERSION}", 0), ("v99.0.0", 1), ("nightly", 0), ("", 0)])
def test_a_wheel_is_built_only_under_the_version_of_its_tag(tmp_path: Path, tag: str, status: int) -> None:
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b.c"]
    shutil.copy(ROOT / "Makefile", tmp_path)
    source = tmp_path / "src" / "shoal" / "core" / "version.py"
    source.parent.mkdir(parents=True)
    shutil.copy(ROOT / source.relative_to(tmp_path), source)
    subprocess.run([*git, "init", "--quiet"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message", "one"], check=True)
    if tag:
        subprocess.run([*git, "tag", tag], check=True)
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "GIT_"))}
    made = subprocess.run(
        ["make", "-C", tmp_path, "wheel", "READY=", "BIN=echo #"], capture_output=True, text=True, env=environment
    )
    assert (made.returncode != 0) == bool(status), made.stderr
    assert ("says otherwise" in made.stdout) == bool(status)
