"""How the suite is run: fast or thorough, and the same however it is begun.

Fast is the default: every test runs, products of cases are thinned. Thorough runs every case.

    pytest                fast
    pytest --thorough     every case, more examples of hypothesis (or SHOAL_TESTS=thorough in the environment)
    pytest --turn 3       fast, with tenth 3 (of 0 to 9) of what takes turns; without it, each day has its own

A fast run leaves out what is marked `thorough`. Of a test marked `pairwise` it takes the cases that have every pair of
values between them; of one marked `in_turns` every tenth case, or every third if it is marked `in_turns(3)`.
A case that is named on the command line always runs.
"""

import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import combinations, groupby
from pathlib import Path
from typing import Any

import pytest
from cpu_seconds import CpuSeconds, lasting
from hypothesis import Phase, settings
from warm import Warm

from shoal.plan.cost import cost

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))  # the policies and packings of `baselines`

TURNS = 10
CONSOLE = ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "CLICOLOR_FORCE", "PY_COLORS", "GITHUB_ACTIONS")
"""Variables that change what is printed."""

SEARCHED = (Phase.explicit, Phase.reuse, Phase.generate)
"""Without the search for a smaller example of a failure: much of the time of tests of what is to fail."""

settings.register_profile("fast", max_examples=10, phases=SEARCHED, deadline=None)
settings.register_profile("thorough", max_examples=100, deadline=None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="every case, not some of each product")
    parser.addoption("--turn", type=int, metavar=f"0..{TURNS - 1}", help="which cases of those that take turns")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Options and environment continue to the processes of xdist. Last, so that pytest has its temporary directory."""
    config.option.thorough |= os.environ.get("SHOAL_TESTS") == "thorough"
    if config.option.turn is None:
        config.option.turn = int(time.time() / 86400) % TURNS
    settings.load_profile("thorough" if config.option.thorough else "fast")
    config.pluginmanager.register(CpuSeconds())
    _begin_alike(config)


def _begin_alike(config: pytest.Config) -> None:
    """Plain output, one thread a process, interrupts heard, and a job history and compiled code of this run's own.

    Arrays are tried in searches of a few steps, too, however fast the machine is and whatever it had time to measure.

    A shell that begins a process in the background has it ignore them, and all that it starts. Processes keep the byte
    code of Shoal: hundreds of them import it.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.umask(0o022)
    for name in [*CONSOLE, "PYTHONDONTWRITEBYTECODE", *(name for name in os.environ if name.startswith("SHOAL_"))]:
        os.environ.pop(name, None)
    cache = str(config._tmp_path_factory.mktemp("cache"))  # after a kill a later run of pytest removes it
    config.add_cleanup(lambda: shutil.rmtree(cache, ignore_errors=True))
    os.environ.update(SHOAL_CACHE=cache, TORCHINDUCTOR_CACHE_DIR=cache)
    os.environ.update(TERM="dumb", OMP_NUM_THREADS="1")
    cost.STEPS_TO_TRY = 1e-6


@pytest.fixture(scope="session")
def shoal() -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """A command of `shoal` as a process that need not import anything."""
    warm = Warm()
    with lasting(warm.pid):
        yield lambda *arguments, cwd: warm.shoal(arguments, cwd)
    warm.close()


@pytest.fixture(scope="session")
def script() -> Iterator[Callable[..., tuple[int, str, str]]]:
    """A script that is run by a process in which scripts have run before: large libraries are imported once."""
    warm = Warm(
        *("-W", "error"),
        *("-W", "ignore:`isinstance(treespec, LeafSpec)`:FutureWarning"),  # of Lightning's own code
        *("-W", "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # of peft's
    )
    with lasting(warm.pid):
        yield lambda path, *arguments, cwd: warm.script(path, arguments, cwd)
    warm.close()


@pytest.fixture(scope="session")
def finished_study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a study that has ended; only to be copied."""
    from finished import made_once  # and torch, which many tests need not import

    place = tmp_path_factory.getbasetemp()
    return made_once(place.parent if "PYTEST_XDIST_WORKER" in os.environ else place)


@pytest.fixture
def finished(finished_study: Path, tmp_path: Path) -> Any:
    """A copy of the finished study, a test's own."""
    import shoal

    return shoal.Study(shutil.copytree(finished_study, tmp_path / "study"))


@pytest.fixture
def own_history() -> None:
    """An empty job history where the last test had its own: in another environment a test would have no warm server."""
    from shoal.plan.cost.history import history_path

    history_path().unlink(missing_ok=True)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """All tests have one environment, so that a local back end has the server of the last one, and the same path of
    modules, of which `shoal run` within a test replaces the first.
    """
    os.environ["PYTEST_CURRENT_TEST"] = "a test"
    path = sys.path.copy()
    try:
        return (yield)
    finally:
        sys.path[:] = path


def pytest_report_header(config: pytest.Config) -> str:
    if config.option.thorough:
        return "thorough: every case"
    return f"fast: some of the cases of each product, all of them with --thorough; turn {config.option.turn} of {TURNS}"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Iterator[None]:
    """What imports and collection make lasts: the garbage collector looks at it neither meanwhile nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Thins the products, and puts the longest tests first, so that none is left alone at the end."""
    if not config.option.thorough:
        named = {argument.partition("::")[2] for argument in config.args if "[" in argument}
        kept = set(_fast(items, config.option.turn))
        kept.update(item for item in items if item.nodeid.partition("::")[2] in named)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    if on_gpu := [item for item in items if item.get_closest_marker("gpu")]:
        import torch

        if not torch.cuda.is_available():
            for item in on_gpu:
                item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and torch sees none here"))


def _fast(items: Iterable[pytest.Item], turn: int) -> Iterator[pytest.Item]:
    """The cases of a fast run."""
    for _, group in groupby(items, key=lambda item: item.nodeid.partition("[")[0]):
        cases = [item for item in group if item.get_closest_marker("thorough") is None]
        marks = {mark.name: mark for item in cases for mark in item.iter_markers()}
        if mark := marks.get("in_turns"):
            every = mark.args[0] if mark.args else TURNS
            cases = cases[turn % min(every, len(cases)) :: every]
        yield from _pairwise(cases) if "pairwise" in marks else cases


def _pairwise(cases: list[pytest.Item]) -> Iterator[pytest.Item]:
    """Cases that have each pair of values of two parameters between them; the one with most new pairs comes first."""
    values = {item: sorted((name, id(value)) for name, value in _parameters(item).items()) for item in cases}
    pairs = {item: set(combinations(each, 2)) for item, each in values.items()}
    missing = set().union(*pairs.values())
    while missing:
        best = max(cases, key=lambda item: len(pairs[item] & missing))
        missing -= pairs[best]
        yield best


def _parameters(item: pytest.Item) -> dict[str, object]:
    return item.callspec.params if hasattr(item, "callspec") else {}


@pytest.fixture
def fusing_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if it had been measured so, whatever else this machine is doing."""
    from shoal.core.demand import Profile
    from shoal.train import run  # not by all tests, since it imports torch

    measure = run.measure

    def sixteen_in_the_time_of_one(*arguments: Any) -> Profile:
        return replace(measure(*arguments), step_seconds={1: 1e-3, 16: 1e-3}, fuse_seconds={})

    monkeypatch.setattr(run, "measure", sixteen_in_the_time_of_one)
