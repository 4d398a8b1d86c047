"""The scenario and the commands of docs/simulate.md run as they stand."""

import re
import shlex
from dataclasses import fields

import pytest
from simulate_samples import REAL, ROOT, needs_data
from typer.testing import CliRunner

from shoal.cli.app import app
from shoal.plan.schedule.auto import OBJECTIVES
from shoal.simulate.scenario import ScenarioTable
from shoal.simulate.tables import CurvesTable, EventTable, JobTable, ModelTable, NodeTable, Range, StudyTable

PAGE = (ROOT / "docs/simulate.md").read_text()
SCENARIO = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)[0]
COMMANDS = [line for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


@needs_data
@pytest.mark.parametrize(
    "command", [pytest.param(x, marks=[pytest.mark.thorough] * ("mixed_day" in x)) for x in COMMANDS]
)
def test_command(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "search.toml").write_text(SCENARIO)
    (tmp_path / "scenarios").symlink_to(ROOT / "scenarios")
    program, *arguments = shlex.split(command)
    done = CliRunner().invoke(app, [*arguments, "--data", str(REAL)])
    assert (program, done.exit_code) == ("shoal", 0), done.output


def test_the_page_has_every_key_and_no_other():
    tables = (ScenarioTable, NodeTable, ModelTable, StudyTable, JobTable, EventTable, Range, CurvesTable)
    known = {key.name for table in tables for key in fields(table)} - {"place"}
    rows = [line for line in PAGE.splitlines() if line.startswith(("| top", "| `[["))]
    keys = {key for row in rows for key in re.findall(r"`([a-z_]+)`", row)}
    assert keys - known == {*OBJECTIVES}
    assert {key for key in known if not re.search(rf"[`{{ ,[]{key}(`| =|])", PAGE)} == set()
