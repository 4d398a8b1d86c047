"""Helpers of jobs on several devices in `shoal status`."""

from shoal.core.job import Purpose
from shoal.core.rows import DeviceRow
from shoal.look.devices import device_json, device_lines
from shoal.look.snapshot import DeviceUse, JobUse


def test_status_says_whom_a_helper_helps() -> None:
    row = DeviceRow("cuda:1", "n0", 8.0, "H200", 100, 1, 1.0, True, "")
    use = DeviceUse(row, (JobUse("job-00004", Purpose.ASSIST, 2, 1.0, 50, 1.0, None, "job-00003"),))
    (line,) = device_lines(use, "epochs")
    assert line.endswith("job-00004 helps job-00003 with 2 trials")
    assert device_json(use)["jobs"][0]["assists"] == "job-00003"
