"""Multiruns of Hydra as studies, by the distribution hydra-shoal-sweeper."""

import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shoal import Study
from shoal.core.domain import Choice, LogRandInt, LogUniform, QUniform, RandInt, Uniform
from shoal.core.space import Space
from shoal.core.version import VERSION

pytest.importorskip("hydra", reason="needs hydra-core, which `make` installs")

ROOT = Path(__file__).parents[2]
SWEEPER = ROOT / "hydra-shoal-sweeper"
sys.path.append(str(SWEEPER))  # as installed, in which Hydra finds its plugins

from hydra import compose, initialize_config_dir  # noqa: E402
from hydra._internal.callbacks import Callbacks  # noqa: E402
from hydra.core.global_hydra import GlobalHydra  # noqa: E402
from hydra.core.plugins import Plugins  # noqa: E402
from hydra.errors import HydraException  # noqa: E402
from hydra.types import HydraContext  # noqa: E402
from hydra_plugins.shoal_sweeper._fused import fused  # noqa: E402
from hydra_plugins.shoal_sweeper._space import flat, nested, overrides, parameters  # noqa: E402

FILES = {
    "config.yaml": """
defaults: [{optimizer: sgd}, _self_]
lr: 0.1
width: 8
layers: [2, 3]
name: none
double: ${width}
""",
    "optimizer/sgd.yaml": "name: sgd\nlr: 0.1\nmomentum: 0.9\n",
    "optimizer/adam.yaml": "name: adam\nlr: 0.001\n",
    "hydra/launcher/other.yaml": "_target_: hydra_plugins.other.Launcher\n",
}
TASK = "hydra.sweeper.task={_target_:fractions.Fraction}"
PROGRAM = f"""
import os, signal, sys
from pathlib import Path
sys.path.append({str(SWEEPER)!r})
import hydra, shoal
from hydra.core.hydra_config import HydraConfig

os.environ.setdefault("ENGINE", str(os.getpid()))

@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    BODY

if __name__ == "__main__":
    main()
"""


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        path = tmp_path / "conf" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "conf"


@pytest.fixture
def hydra(conf: Path) -> Iterator[HydraContext]:
    with initialize_config_dir(str(conf), version_base=None):
        yield HydraContext(GlobalHydra.instance().config_loader(), Callbacks())


def composed(conf: Path, *lines: str) -> Any:
    lines = ("hydra/sweeper=shoal", f"hydra.sweep.dir={conf.parent / 'study'}", *lines)
    return compose("config", overrides=list(lines), return_hydra_config=True)


def sweep(hydra: HydraContext, conf: Path, *lines: str) -> Any:
    """Sweep as `python train.py -m` does, but in this process."""
    settings = [line for line in lines if line.startswith("hydra")]
    sweeper = Plugins.instance().instantiate_sweeper(
        hydra_context=hydra, task_function=lambda cfg: cfg.lr, config=composed(conf, *settings)
    )
    return sweeper.sweep([line for line in lines if line not in settings])


@pytest.mark.parametrize(
    ("line", "key", "expected"),
    [
        ("lr=interval(1e-3, 1)", "lr", Uniform(1e-3, 1.0)),
        ("lr=tag(log, interval(1e-3, 1))", "lr", LogUniform(1e-3, 1.0)),
        ("width=int(interval(1, 5))", "width", RandInt(1, 5)),
        ("width=tag(log, int(interval(1, 5)))", "width", LogRandInt(1, 5)),
        ("width=range(1, 7, 2)", "width", RandInt(1, 6, 2)),
        ("width=range(1, 8, 2)", "width", RandInt(1, 8, 2)),
        ("width=range(10, 0, -5)", "width", RandInt(5, 11, 5)),
        ("lr=range(0.1, 0.4, 0.1)", "lr", QUniform(0.1, 0.3, 0.1)),
        ("lr=1,0.5,true,null,nan", "lr", Choice((1, 0.5, True, "null", "nan"))),
        ("name='a, b', c, \"1\"", "name", Choice(("'a, b'", "c", '"1"'))),
        ("width=shuffle(3, 1, 2)", "width", Choice((3, 1, 2))),
        ("layers=[2, 3],[]", "layers", Choice(("[2,3]", "[]"))),
        ("optimizer=glob(*)", "optimizer", Choice(("adam", "sgd"))),
        ("optimizer@second=sgd,adam", "optimizer@second", Choice(("sgd", "adam"))),
        ("+new.key=1,2", "+new.key", Choice((1, 2))),
        ("name='a, b'", "name", "'a, b'"),
        ("~layers", "~layers", None),
    ],
)
def test_an_override_is_a_domain_or_a_constant(hydra: HydraContext, line: str, key: str, expected: object) -> None:
    found = parameters([line], hydra.config_loader)
    assert found == {key: expected}
    Space(nested(found, found))  # which it can be in


def test_a_config_is_the_overrides_that_compose_it(hydra: HydraContext, conf: Path) -> None:
    lines = ["lr=1", "optimizer=adam,adam", "optimizer.lr=3.0,3.0", "name='a, b','a, b'", "~layers", "lr=2,2"]
    found = parameters(lines, hydra.config_loader)
    config = Space(nested(found, found)).sample(0)
    assert config == {"lr": 2, "/optimizer": "adam", "optimizer": {"lr": 3.0}, "name": "'a, b'", "~layers": None}
    assert flat(config) == {"lr": 2, "optimizer": "adam", "optimizer.lr": 3.0, "name": "'a, b'", "~layers": None}
    made = compose("config", overrides=overrides(config))
    assert made == {"lr": 2, "width": 8, "double": 8, "name": "a, b", "optimizer": {"name": "adam", "lr": 3.0}}


def test_a_fused_space_is_the_composed_config_with_domains(hydra: HydraContext, conf: Path) -> None:
    lines = ["optimizer=adam,sgd", "optimizer.lr=tag(log,interval(1e-3,1))", "layers=[1],[1,2]", "lr=2"]
    config = composed(conf, "hydra.sweeper.task={_target_:fractions.Fraction,numerator:'${width}'}")
    task, space = fused(hydra.config_loader, config, parameters(lines, hydra.config_loader))
    lr = LogUniform(1e-3, 1.0)
    options = [{"name": "adam", "lr": lr}, {"name": "sgd", "lr": lr, "momentum": 0.9}]
    expected = {"optimizer": options, "lr": 2, "width": 8, "layers": Choice(([1], [1, 2])), "name": "none", "double": 8}
    assert (task, space) == (8, Space(expected))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["hydra/launcher=other"], "hydra/launcher=other has no part in a study of Shoal, whose back ends"),
        (["hydra.sweeper.study={tiemout:3}"], r"does not take tiemout; this version of shoal.tune takes metric, mode"),
        (["hydra.sweeper.study={directory:x}"], "does not take directory"),
        (["hydra.sweeper.algorithm=ashes"], "must name one of grid, random, .* got 'ashes'"),
        (["hydra.sweeper.algorithm=asha"], r"missing a required argument: 'max_epochs'; asha takes \(n: int, max_epo"),
        (["lr=tag(log, choice(1, 2))"], r"lr=tag\(log, choice\(1, 2\)\): .* the tag log of this sweep; it knows tag"),
        (["lr=range(3, 1)"], r"lr=range\(3, 1\): the range holds no value"),
        (["lr=tag(log, interval(0, 1))"], "`lr`: low must be above 0"),
        (["typo=1,2"], "typo"),
        (["lr=1,2", "hydra.sweeper.devices=tpu"], "tpu"),
        (
            [TASK, "width=1,2"],
            "width=1 changes double, too, which trials",
        ),
        (
            ["hydra.sweeper.task={_target_:fractions.Fraction,numerator:'${lr}'}", "lr=1,2"],
            "lr=1 changes hydra.sweeper.task, too",
        ),
        ([TASK, "layers.0=1,2"], "no mapping with layers.0"),
        ([TASK, "lr=1,2"], r"missing a required argument: 'epochs'"),
    ],
)
def test_what_is_refused_leaves_no_directory(hydra: HydraContext, conf: Path, lines: list[str], message: str) -> None:
    with pytest.raises(HydraException, match=message):
        sweep(hydra, conf, *lines)
    assert not (conf.parent / "study").exists()


def run(script: Callable[..., tuple[int, str, str]], conf: Path, body: str, *lines: str) -> tuple[int, str, str]:
    path = conf.parent / "train.py"
    path.write_text(PROGRAM.replace("BODY", body.replace("\n", "\n    ")))
    fixed = ("-m", "hydra/sweeper=shoal", "hydra.sweep.dir=study", "hydra.sweeper.devices=cpu:1")
    return script(path, *fixed, *lines, cwd=conf.parent)


def results(conf: Path) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.load(conf.parent / "study/optimization_results.yaml"))


def test_a_multirun_is_a_study_and_a_further_one_goes_on_with_it(script: Any, conf: Path) -> None:
    body = """assert Path.cwd() == Path(HydraConfig.get().runtime.output_dir)
Path("job").write_text(f"{HydraConfig.get().job.num} {cfg.name}")
return cfg.lr + cfg.width + (cfg.optimizer.name == "adam")"""
    lines = ["hydra.sweeper.algorithm=grid", "hydra.job.chdir=true", "optimizer=glob(*)", "width=range(1,3)"]
    lines += ["lr=2", "name='a, b'"]
    status, _, errors = run(script, conf, body, *lines)
    assert status == 0, errors
    params = {"optimizer": "sgd", "width": 1}
    assert results(conf) == {"name": "shoal", "best_params": params, "best_value": 3.0}
    study = Study(conf.parent / "study")
    assert [trial.objective for trial in study.trials] == [4, 5, 3, 4]
    assert [(study.directory / f"{n}/job").read_text() for n in range(4)] == [f"{n} a, b" for n in range(4)]

    for name in ("optimization_results.yaml", "0/job"):
        (study.directory / name).unlink()
    status, _, errors = run(script, conf, body, *lines)
    assert (status, results(conf)["best_value"]) == (0, 3.0), errors
    assert not (study.directory / "0/job").exists()
    status, _, errors = run(script, conf, body, *lines[:-1], "name=c", "hydra.sweeper.mode=max")
    assert status == 1
    assert "holds a study of another search, which differs in name, mode; repeat its sweep" in errors


def test_a_killed_multirun_goes_on_with_its_trials(conf: Path) -> None:
    body = """for epoch in range(shoal.step(), 2):
    (shoal.checkpoint() / "epoch").write_text(str(epoch))
    if cfg.lr == 2 and epoch == 1 and not Path("killed").exists():
        Path("killed").touch()
        os.kill(int(os.environ["ENGINE"]), signal.SIGKILL)
    shoal.report({"loss": cfg.lr + epoch})"""
    (conf.parent / "train.py").write_text(PROGRAM.replace("BODY", body.replace("\n", "\n    ")))
    lines = ["hydra.sweep.dir=study", "hydra.sweeper.devices=cpu:1", "hydra.sweeper.algorithm={name:grid,epochs:2}"]
    line = [sys.executable, "train.py", "-m", "hydra/sweeper=shoal", *lines, "hydra.sweeper.metric=loss", "lr=1,2,3"]
    done = [subprocess.run(line, cwd=conf.parent, capture_output=True, text=True) for _ in range(2)]
    assert [each.returncode for each in done] == [-signal.SIGKILL, 0], done[1].stderr
    assert results(conf) == {"name": "shoal", "best_params": {"lr": 1}, "best_value": 1.0}
    trials = Study(conf.parent / "study").trials
    assert [(trial.epoch, trial.metrics["loss"]) for trial in trials] == [(2, 2), (2, 3), (2, 4)]


def test_several_metrics_are_returned_and_written_as_solutions(script: Any, conf: Path) -> None:
    lines = ["hydra.sweeper.metric=[a,b]", "hydra.sweeper.mode=[min,max]", "hydra.sweeper.n=2", "lr=3,3"]
    search = "hydra.sweeper.algorithm={_target_:shoal.OptunaSearch,epochs:1,sampler:random}"
    status, _, errors = run(script, conf, "return cfg.lr, cfg.width", *lines, search)
    assert status == 0, errors
    assert results(conf) == {"name": "shoal", "solutions": [{"params": {"lr": 3}, "values": [3.0, 8.0]}] * 2}


def test_a_function_that_returns_and_reports_nothing_fails_with_the_remedy(script: Any, conf: Path) -> None:
    status, _, errors = run(script, conf, "pass", "lr=1,2", "hydra.sweeper.study={retries:0}")
    assert status == 1
    assert "main reported nothing and returned None; return the value of value, or call shoal.report" in errors


def test_a_first_point_has_names_of_overrides_and_a_trial_its_fold(script: Any, conf: Path) -> None:
    study = "hydra.sweeper.study={folds:2,initial:[{optimizer:adam,optimizer.lr:3}]}"
    lines = [study, "hydra.sweeper.n=1", "optimizer=sgd,adam", "optimizer.lr=interval(0,9)"]
    status, _, errors = run(script, conf, "return cfg.optimizer.lr + cfg.fold", *lines)
    assert status == 0, errors
    params = {"optimizer": "adam", "optimizer.lr": 3}
    assert results(conf) == {"name": "shoal", "best_params": params, "best_value": 3.5}


@pytest.mark.in_turns(2)
@pytest.mark.parametrize("way", ["called", "as arrays"])
def test_the_example(way: str, script: Any, tmp_path: Path) -> None:
    """As its text says, at a smaller size: the function, or the task as arrays."""
    code = (ROOT / "examples/hydra_digits.py").read_text()
    (space,) = re.findall(r"'(lr=.*?)' (\S+) '(.*?)'\n", code)
    (arrays,) = re.findall(r"\n        '(.*)' '(.*)'\n", code)
    path = tmp_path / "hydra_digits.py"
    path.write_text(f"import sys\nsys.path += {[str(SWEEPER), str(ROOT / 'examples')]!r}\n{code}")
    fixed = [f"hydra.sweeper.{x}" for x in ("metric=accuracy", "mode=max", "n=2", "devices=cpu:1")]
    lines = ["-m", "hydra/sweeper=shoal", "hydra.sweep.dir=study", *fixed, *space]
    status, _, errors = script(path, *lines, *(["epochs=1"] if way == "called" else arrays), cwd=tmp_path)
    assert status == 0, errors
    trials = Study(tmp_path / "study").trials
    assert [trial.epoch for trial in trials] == [1 if way == "called" else 3] * 2
    assert all(trial.metrics["accuracy"] > 0.05 and trial.config["width"] in (64, 128) for trial in trials)


def test_the_search_of_the_page_for_those_who_come_from_hydra(script: Any, tmp_path: Path) -> None:
    page = (ROOT / "docs/coming_from.md").read_text().partition("## Hydra")[2]
    lines, code = (re.search(rf"```{kind}\n(.*?)```", page, re.DOTALL)[1] for kind in ("sh", "python"))
    (command,) = [line for line in lines.replace("\\\n", "").splitlines() if "sweeper=shoal" in line]
    path = tmp_path / "train.py"
    path.write_text(f"import sys\nsys.path.append({str(SWEEPER)!r})\n{code}")
    arguments = shlex.split(command.replace("n=8", "n=2"))[2:]
    status, _, errors = script(path, *arguments, "hydra.sweeper.devices=cpu:1", cwd=tmp_path)
    assert status == 0, errors
    trials = Study(tmp_path / "runs/hydra").trials
    assert [set(trial.config) for trial in trials] == [{"lr", "momentum"}] * 2
    assert all(trial.objective >= 0 for trial in trials)


def test_its_version_is_that_of_shoal() -> None:
    assert tomllib.loads((SWEEPER / "pyproject.toml").read_text())["project"]["version"] == VERSION
