from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.core.errors import BackendError
from shoal.run import BACKENDS, Backend, WorkerContext, backend_class
from shoal.testing.backends import BACKEND_CHECKS


@pytest.mark.parametrize("check", BACKEND_CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make", [BACKENDS[name] for name in ("inline", "local")], ids=["inline", "local"])
def test_the_back_end_keeps_the_contract(
    make: type[Backend], check: Callable[[type[Backend], Path], None], tmp_path: Path
) -> None:
    check(make, tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param("locl", r"unknown back end 'locl' \(did you mean 'local'\?\), known are .*, 'slurm'$", id="typo"),
        pytest.param("pbs", "unknown back end 'pbs', known are .*, 'ray', 'slurm'$", id="nothing like it"),
    ],
)
def test_an_unknown_back_end_is_an_error_that_names_the_known(name: str, message: str) -> None:
    with pytest.raises(BackendError, match=message):
        backend_class(name)


def test_a_known_back_end_is_made_for_the_workplace(tmp_path: Path) -> None:
    worker_context = WorkerContext(tmp_path, b"", runner="shoal.testing.backends:follow")
    backend = backend_class("inline")(worker_context)
    assert type(backend) is BACKENDS["inline"]
    assert backend.worker_context is worker_context
    backend.close()
