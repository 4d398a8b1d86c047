"""Plans weigh what trying an array costs, as users' do."""

import pytest


@pytest.fixture(autouse=True)
def little_work_is_tried() -> None:
    """In the place of the fixture of all tests, which has arrays tried whatever they cost."""
