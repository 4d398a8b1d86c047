"""What the tests of the page need: its packages, and a real browser, Debian's chromium, driven by playwright."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


def pytest_pycollect_makemodule() -> None:
    """Skip the whole folder without the packages of the page."""
    for name in ("starlette", "uvicorn"):
        pytest.importorskip(name, reason=f"{name} is not installed: pip install '.[page]'")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    program = shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        pytest.skip("no browser: install it with apt-get install chromium")
    playwright = pytest.importorskip(
        "playwright.sync_api", reason="playwright is not installed: pip install playwright"
    )
    with playwright.sync_playwright() as driver:
        found = driver.chromium.launch(executable_path=program, args=["--no-sandbox", "--disable-gpu"])
        yield found
        found.close()


@pytest.fixture(scope="session")
def pictures() -> Path | None:
    """Folder of the screenshots: SHOT_FOLDER of the environment, without which none are taken."""
    if not (name := os.environ.get("SHOT_FOLDER")):
        return None
    Path(name).mkdir(parents=True, exist_ok=True)
    return Path(name)
