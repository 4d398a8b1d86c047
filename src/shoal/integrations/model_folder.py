"""Exported trials: a folder with weights, what they are, the source of the task, and a function that loads them."""

import inspect
import json
import logging
import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from shoal.core.errors import ShoalError
from shoal.core.ranking import ranked
from shoal.core.rows import TrialRow, values
from shoal.core.version import VERSION
from shoal.host.remedy import command
from shoal.host.sources import NOTEBOOK_CELL, imported_packages, is_importable, sources, unrecorded_files
from shoal.integrations import load_adapter, load_pretrained, load_task
from shoal.integrations.peft import adapted_model, merged_model
from shoal.integrations.read_back import hooks, lost_by_adapter, lost_by_class
from shoal.journal.view import JournalView
from shoal.look.model_card import model_card
from shoal.look.text import finite_or_none
from shoal.train.checkpoint import Weights
from shoal.train.checkpoint_paths import is_exportable, program_directory

__all__ = ["check_new_folder", "export_model", "export_program"]

_log = logging.getLogger("shoal.integrations")

_REMEDY = "export the whole model, without `adapter` and `merged` (--adapter, --merged)"
_LOADERS = {"task": load_task, "pretrained": load_pretrained, "adapter": load_adapter}


def check_new_folder(folder: Path) -> None:
    """Refuse a folder that holds something."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ShoalError(f"{folder} exists and is not empty; name another folder (`directory`, --output), or delete it")


def export_model(
    journal: JournalView,
    row: TrialRow,
    model: nn.Module,
    weights: Weights,
    folder: Path,
    *,
    adapter: bool,
    merged: bool,
) -> Path:
    """Write the folder of a trained model, and return it; see `Study.export`."""
    if adapter:
        model = adapted_model(model)
    if merged:
        before = hooks(model)
        model = merged_model(model)
        if lost := [name for name in before if name not in hooks(model)]:
            raise ShoalError(f"the merged model is not what was trained: it lacks the hook {lost[0]}; {_REMEDY}")
    metrics = dict(weights.metrics)
    facts = _facts(journal, row, weights.epoch, metrics.get(weights.epoch, {})) | {
        "step": weights.step,
        "default_dtype": journal.spec.settings.get("default_dtype", "float32"),
        "merged": merged,
        "bytecode": b"cloudpickle.cloudpickle" in journal.blob("task"),
    }
    classes = {type(module).__module__.partition(".")[0] for module in model.modules()}
    with _new_folder(folder):
        if saved := _saved_by_itself(model, weights, folder, adapter=adapter):
            facts |= saved
        else:
            facts |= {"loader": "task", "library": "pytorch", "weights": _save(model, folder)}
            (folder / "task.pkl").write_bytes(journal.blob("task"))
            if weights.carried:
                (folder / "state.pkl").write_bytes(weights.carried)
        (folder / "load.py").write_text(inspect.getsource(_LOADERS[facts["loader"]]), encoding="utf-8")
        _describe(folder, journal, facts, {"torch", *classes})
    return folder


def _saved_by_itself(model: Any, weights: Weights, folder: Path, *, adapter: bool) -> dict[str, Any]:
    """Save a model by its `save_pretrained`, and return the facts about it; {} if that would lose a part of the model.

    Args:
        adapter: Whether it must be saved so, or else a ShoalError is raised.
    """
    if not adapter and not _saves_itself(model):
        return {}
    loader = "adapter" if hasattr(model, "peft_config") else "pretrained"
    model.save_pretrained(str(folder))
    if loader == "adapter":
        lost = lost_by_adapter(model, weights.carried)
    else:
        lost = lost_by_class(model, weights.carried, folder)
    if lost and adapter:
        raise ShoalError(f"the adapter alone is not what was trained: it lacks {lost}; {_REMEDY}")
    if lost:
        text = "%s holds a state dict, and load.py builds the model by the task, as `save_pretrained` loses %s"
        _log.warning(text, folder, lost)
        _empty(folder)
        return {}
    inner: Any = model.get_base_model() if loader == "adapter" else model
    library = type(model).__module__.partition(".")[0]
    return {
        "loader": loader,
        "weights": "from_pretrained",
        "library": library if library in ("peft", "transformers") else "pytorch",
        "class": [type(inner).__module__, type(inner).__qualname__],
        "base_model": getattr(inner, "name_or_path", "") or None if loader == "adapter" else None,
    }


def export_program(journal: JournalView, row: TrialRow, folder: Path, best: int | None) -> Path:
    """Write the folder of a trial that a function or a command trained, with the files that it kept, and return it."""
    kept = program_directory(journal.directory, row.number, best)
    if not is_exportable(journal.directory, row.number, best):
        raise ShoalError(
            f"trial {row.number} of the study in {journal.directory} has kept no files; let the program save its model "
            "in shoal.checkpoint() before each report"
        )
    name = kept.parent.name.partition("-")[0]
    step = int(name) if name.isdecimal() and kept.name == "files" else row.epoch
    metrics = next((report.metrics for report in journal.curve(row.number) if report.epoch == step), {})
    facts = _facts(journal, row, step, metrics) | {"loader": None, "library": None, "weights": "checkpoint"}
    with _new_folder(folder):
        shutil.copytree(kept, folder / "checkpoint", symlinks=True)
        _describe(folder, journal, facts, set())
    return folder


def _facts(journal: JournalView, row: TrialRow, epoch: int, metrics: Mapping[str, float]) -> dict[str, Any]:
    """Return what trial.json says of every trial."""
    spec, trial = journal.spec, row.trial
    rows = [each for each in ranked(journal.configurations(), journal.objectives) if values(each, journal.objectives)]
    own = spec.repetition.configuration(row.number)
    ranks = [i for i, each in enumerate(rows, 1) if spec.repetition.configuration(each.number) == own]
    return {
        "study": journal.directory.resolve().name,
        "task": spec.task,
        "trial": row.number,
        "rank": ranks[0] if ranks else None,
        "of": len(rows),
        "trials_of_configuration": len(spec.repetition.trials(own)),
        "aggregate": spec.repetition.aggregate,
        "goals": [{"metric": goal.metric, "mode": goal.mode} for goal in journal.objectives],
        "config": trial.config,
        "seed": trial.seed,
        "data_seed": trial.data_seed,
        "origin": None if trial.origin is None else {"trial": trial.origin.trial, "epoch": trial.origin.epoch},
        "unit": "report" if spec.opaque else "epoch",
        "epoch": epoch,
        "metrics": _finite(metrics),
        "best": {"epoch": row.best_epoch, "metrics": _finite(row.ranked)},
        "last": {"epoch": row.epoch, "metrics": _finite(row.metrics)},
        "seconds": row.seconds,
        "device": row.device,
        "shoal": spec.shoal,
        "rerun": command("rerun", journal.directory, str(row.number)),
    }


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {name: finite_or_none(value) for name, value in metrics.items()}


def _saves_itself(model: nn.Module) -> bool:
    """Whether a model writes a folder that its class reads in another process."""
    cls = type(model)
    known = all(callable(getattr(cls, name, None)) for name in ("save_pretrained", "from_pretrained"))
    return known and is_importable(cls.__module__) and "<locals>" not in cls.__qualname__


def _save(model: nn.Module, place: Path) -> str:
    """Write the state dict, and return the name of the file."""
    state = model.state_dict()
    if find_spec("safetensors") is not None and all(map(_is_plain, state.values())):
        from safetensors.torch import save_model

        save_model(model, str(place / "model.safetensors"), metadata={"format": "pt"})
        return "model.safetensors"
    torch.save(state, place / "model.pt")
    return "model.pt"


def _is_plain(value: Any) -> bool:
    """Whether safetensors stores a value of a state dict: no extra state, no view, no tensor of a class of its own."""
    if type(value) is not Tensor or value.layout is not torch.strided or value.is_complex():
        return False
    return value.untyped_storage().nbytes() == value.nbytes


@contextmanager
def _new_folder(folder: Path) -> Iterator[None]:
    """Make a folder, or take an empty one, to be written within; of a failure nothing that was written is left.

    The folder may be a mount or the working directory, so that no other one can be renamed to it.
    """
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        if made:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            _empty(folder)
        if isinstance(error, OSError):
            text = f"{folder} cannot be written: {error}; name another folder (`directory`, --output)"
            raise ShoalError(text) from error
        raise


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _describe(folder: Path, journal: JournalView, facts: Mapping[str, Any], packages: set[str]) -> None:
    """Write what is beside the weights: the sources, trial.json and README.md.

    Args:
        packages: Packages whose versions are told, besides those that the sources import.
    """
    found = _sources(journal, with_modules=facts["loader"] is not None)
    for name, text in found.texts.items():
        target = folder / "source" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8", newline="")
    versions = _versions(packages.union(*map(imported_packages, found.texts.values())))
    facts = {**facts, "script": found.script, "missing": found.missing, "versions": versions}
    (folder / "trial.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
    names = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir() if path.name != "README.md")
    (folder / "README.md").write_text(model_card(facts, names), encoding="utf-8")


class _Sources(NamedTuple):
    """Source files of a task.

    Args:
        texts: Path in the folder `source` -> text.
        script: Path of the script whose definitions are in the pickle, so that nothing imports it; None if there is
            none.
        missing: What is missing, in words.
    """

    texts: dict[str, str]
    script: str | None
    missing: list[str]


def _sources(journal: JournalView, *, with_modules: bool) -> _Sources:
    """Return files that the study recorded as they were then; `with_modules`, others of the task's projects as now."""
    recorded, script = journal.study.get("sources", {}), journal.study.get("script")
    files = {Path(os.path.abspath(name)): source["text"] for name, source in recorded.items()}
    root = _root(journal.spec.project, [path.parent for path, text in files.items() if text is not None])
    found: dict[str, str | None] = {}
    for path, text in files.items():  # a program without text, such as an interpreter, may be elsewhere
        found[str(path.relative_to(root if path.is_relative_to(root) else path.anchor))] = text
    missing, own = [], None
    if script is not None:
        if script["name"] not in found:
            own = script["name"]
            found[own] = script["text"]
        if script["text"] is None:
            missing.append("the source of the task, which was defined in an interactive session")
        elif script["name"] == NOTEBOOK_CELL:
            missing.append("cells of the notebook other than that of the task, which may use what they define")
    if with_modules:
        for folder, paths in unrecorded_files(journal.blob("task"), recorded).items():
            for name, source in sources(paths).items():
                found.setdefault(str(Path(name).relative_to(folder)), source["text"])
    unread = [name for name, text in found.items() if text is None and (script is None or name != script["name"])]
    missing += [f"{name}: too long, or not UTF-8" for name in unread]
    return _Sources({name: text for name, text in found.items() if text is not None}, own, missing)


def _root(project: str | None, folders: list[Path]) -> Path:
    """Return the folder to which the paths of sources are relative: the project, or for a command what is common."""
    if project is not None:
        return Path(os.path.abspath(project))
    return Path(os.path.commonpath(folders)) if folders else Path()


def _versions(packages: set[str]) -> dict[str, str]:
    """Return the versions of Python and Shoal, and of the packages that are installed."""
    found = {"python": platform.python_version(), "shoal": VERSION}
    for name in sorted(packages - found.keys()):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # the distribution has another name, or it is no package
            if isinstance(own := getattr(sys.modules.get(name), "__version__", None), str):
                found[name] = own
    return found
