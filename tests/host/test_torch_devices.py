"""A real process asks a `torch` that is invented."""

import pytest

from shoal.core.errors import DeviceError
from shoal.host.machine import Accelerator, ThisMachine, torch_devices

TORCH = """
print("a line that an import prints")


class backends:
    class mps:
        is_available = staticmethod(lambda: {apple})
        get_name = staticmethod(lambda: "Apple M2")


class mps:
    recommended_max_memory = staticmethod(lambda: 20_000)


class xpu:
    device_count = staticmethod(lambda: 2)
    get_device_name = staticmethod(lambda index: f"Intel Max {{index}}")
    get_device_properties = staticmethod(lambda index: type("Properties", (), {{"total_memory": 48_000 + index}}))
"""


@pytest.fixture
def torch(tmp_path, monkeypatch):
    """Writes the module that a new process finds as torch."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return (tmp_path / "torch.py").write_text


@pytest.mark.parametrize(
    ("sort", "apple", "expected"),
    [
        pytest.param("mps", True, [Accelerator("mps:0", "Apple M2", 20_000)], id="Apple's"),
        pytest.param("mps", False, [], id="not Apple's"),
        pytest.param(
            "xpu", False, [Accelerator(f"xpu:{i}", f"Intel Max {i}", 48_000 + i) for i in (0, 1)], id="Intel's"
        ),
    ],
)
def test_devices_of_a_type(torch, sort, apple, expected):
    torch(TORCH.format(apple=apple))
    assert list(torch_devices(sort)) == expected


def test_an_apple_machine_lists_its_devices_by_torch(torch, monkeypatch):
    torch(TORCH.format(apple=True))
    monkeypatch.setattr("platform.system", lambda: "Darwin")
    monkeypatch.setattr("platform.machine", lambda: "arm64")
    assert [each.name for each in ThisMachine().accelerators("mps")] == ["mps:0"]


def test_a_torch_that_fails_is_an_error_with_its_last_line(torch):
    torch("raise ImportError('libsycl.so.8: cannot open shared object file')")
    with pytest.raises(DeviceError, match=r"'xpu': ImportError: libsycl.so.8: .*; use devices='cpu'"):
        torch_devices("xpu")
