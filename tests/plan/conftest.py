"""Plans weigh what trying an array costs, as users' do."""

import pytest

from shoal.plan.cost import cost


@pytest.fixture(autouse=True)
def steps_to_try(monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps that users' plans count, in the place of those of all other tests."""
    monkeypatch.setattr(cost, "STEPS_TO_TRY", 30)
