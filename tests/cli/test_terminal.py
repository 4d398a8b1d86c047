"""Tables on a terminal of 80 columns without colours, in a pipe, and where standard output knows ASCII alone."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from timeline_samples import pretend

SHOAL = [sys.executable, "-c", "from shoal.__main__ import main; main()"]
COMMANDS = [["status"], ["trials"], ["report", "--accounting"], ["best"]]
COLOURS = re.compile(r"\x1b\[(?:\d+;)*(?:3[0-7]|4[0-7]|9[0-7]|38|48)(?:;\d+)*m")


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("studies") / "study"
    pretend(directory, devices=2, jobs=12, failing=0.4).close()
    return directory


def on_terminal(command: list[str], columns: int) -> list[str]:
    """Lines that a command prints on a terminal."""
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    environment = {**os.environ, "NO_COLOR": "1", "TERM": "xterm-256color"}
    environment.pop("COLUMNS", None)
    process = subprocess.Popen([*SHOAL, *command], stdin=follower, stdout=follower, stderr=follower, env=environment)
    os.close(follower)
    content = b""
    try:
        while part := os.read(leader, 65536):
            content += part
    except OSError:  # the end of a terminal
        pass
    os.close(leader)
    assert process.wait(60) == 0, content
    return content.decode().splitlines()


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("command", COMMANDS, ids=[" ".join(each) for each in COMMANDS])
def test_a_terminal_of_80_columns_without_colours(study: Path, command: list[str]) -> None:
    lines = on_terminal([command[0], str(study), *command[1:]], 80)
    assert [line for line in lines if COLOURS.search(line)] == []
    plain = [re.sub(r"\x1b\[[\d;]*m", "", line) for line in lines]
    assert [line for line in plain if len(line) > 80 and str(study) not in line] == []
    assert len(plain) >= 3


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("command", COMMANDS, ids=[" ".join(each) for each in COMMANDS])
def test_lines_in_a_pipe_end_with_their_text(study: Path, command: list[str]) -> None:
    done = subprocess.run([*SHOAL, command[0], study, *command[1:]], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert len(lines) >= 3
    assert [line for line in lines if line != line.rstrip() or "\x1b" in line] == []


@pytest.mark.in_turns(4)
@pytest.mark.parametrize("command", COMMANDS, ids=[" ".join(each) for each in COMMANDS])
def test_where_standard_output_knows_ascii_alone(study: Path, command: list[str]) -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run([*SHOAL, command[0], study, *command[1:]], capture_output=True, env=environment)
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False)
    assert (done.stdout.isascii(), b"\\u" in done.stdout + done.stderr) == (True, False)
