"""Record the live page of a search as an animated picture.

    python tools/record_page.py docs/pictures/page.gif [--seconds 20]

Runs `shoal run examples/digits.py --page` in a new directory, shows its views in a browser (Debian's chromium, driven
by playwright) and writes a frame a second. Needs the `dev` extra.
"""

import argparse
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parents[1]
SIZE = {"width": 960, "height": 600}
VIEWS = (("overview", 0.4), ("curves", 0.2), ("space", 0.15), ("trials", 0.15), ("diagnosis", 0.1))
"""View -> its part of the frames."""
COLOURS = 96


def main() -> int:
    """Record the picture that the command line names."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("picture", type=Path)
    parser.add_argument("--seconds", type=int, default=20, help="length of the recording")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "shoal", "run", str(ROOT / "examples/digits.py"), "--page"]
        study = subprocess.Popen(
            [*command, "--directory", f"{folder}/digits"],
            stderr=subprocess.PIPE, text=True, cwd=folder, env=os.environ | {"SHOAL_CACHE": f"{folder}/cache"},
        )  # fmt: skip
        assert study.stderr is not None
        address = next(found[0] for line in study.stderr if (found := re.search(r"http://\S+", line)))
        try:
            frames = record(address, arguments.seconds)
        finally:
            study.terminate()
            study.communicate()
    first, *others = (frame.quantize(COLOURS, dither=Image.Dither.NONE) for frame in frames)
    first.save(arguments.picture, save_all=True, append_images=others, duration=900, loop=0, optimize=True)
    print(f"{arguments.picture}: {len(frames)} frames, {arguments.picture.stat().st_size / 1000:.0f} kB")
    return 0


def record(address: str, seconds: int) -> list[Image.Image]:
    """The frames of the views of a page, one a second."""
    frames = []
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tab = browser.new_page(viewport=SIZE, color_scheme="light")
        tab.goto(address)
        tab.wait_for_selector("#tabs a")
        tab.wait_for_selector("text=by trial")  # the first value
        for view, part in VIEWS:
            tab.evaluate("view => { location.hash = view }", f"/digits/{view}")
            for _ in range(max(1, round(seconds * part))):
                tab.wait_for_timeout(1000)
                frames.append(Image.open(io.BytesIO(tab.screenshot())).convert("RGB"))
        browser.close()
    return frames


if __name__ == "__main__":
    sys.exit(main())
