"""`tools/quick.py` runs benchmarks as scripts, and fails if one of them does, with its output."""

import subprocess
import sys
from pathlib import Path

TOOLS = Path(__file__).parents[1] / "tools"
CODE = """
import sys
from pathlib import Path
sys.path[0] = sys.argv.pop(1)
import quick
quick.BENCHMARKS = Path(sys.argv.pop(1))
quick._import = lambda names: None  # torch is not needed here
sys.exit(quick.main())
"""
SCRIPTS = {
    "good": "import sys, beside\nprint('runs well')\nsys.exit(0 if (__name__, sys.argv[1:]) == beside.EXPECTED else 1)",
    "beside": "EXPECTED = ('__main__', ['--quick'])",
    "asked": "import sys\nprint('half of it')\nsys.exit('a figure is missed')",
    "raises": "raise ValueError('no such kernel')",
}


def test_each_runs_and_what_one_that_fails_printed_is_shown(tmp_path: Path) -> None:
    for name, code in SCRIPTS.items():
        (tmp_path / f"{name}.py").write_text(code)
    command = [sys.executable, "-c", CODE, TOOLS, tmp_path]
    done = subprocess.run([*command, "good", "asked", "raises"], capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (1, "")
    assert [line.split()[0] for line in lines if line.endswith(" CPU seconds")] == ["good", "asked", "raises"]
    assert "runs well" not in lines
    for said in ("half of it", "a figure is missed", "asked ended with status 1", "ValueError: no such kernel"):
        assert said in lines
    assert lines[-1].endswith("failed: asked, raises")
    done = subprocess.run([*command, "good"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].endswith("failed: none")
