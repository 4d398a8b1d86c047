"""Values that a task may return as its batch size, and values that are refused."""

from typing import Any

import numpy as np
import pytest
import torch

from shoal.core.errors import TaskError
from shoal.core.trial import Config
from shoal.train.step_settings import batch_size


class Sized:
    """Minimal task with a batch size."""

    def __init__(self, returned: Any) -> None:
        self.returned = returned

    def batch_size(self, config: Config) -> Any:
        return self.returned


@pytest.mark.parametrize("returned", [16, np.int64(16), np.uint8(16), torch.tensor(16)], ids=repr)
def test_whole_numbers_of_any_kind(returned: Any) -> None:
    size = batch_size(Sized(returned), {"lr": 0.1})
    assert (type(size), size) == (int, 16)


@pytest.mark.parametrize(
    "returned", [0, -1, True, 1.5, 16.0, None, "16", np.float64(16), torch.tensor(16.0), torch.tensor(True)], ids=repr
)
def test_nothing_else(returned: Any) -> None:
    with pytest.raises(TaskError, match=r"must return a positive integer, got .* for \{'lr': 0.1\}; return an int"):
        batch_size(Sized(returned), {"lr": 0.1})
