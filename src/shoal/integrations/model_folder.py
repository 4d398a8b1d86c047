"""Exported trials: a folder with weights, what they are, the source of the task, and a function that loads them."""

import inspect
import json
import platform
import shutil
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import ShoalError
from shoal.core.ranking import ranked
from shoal.core.rows import TrialRow, values
from shoal.core.version import VERSION
from shoal.host.remedy import command
from shoal.host.sources import imported_packages, is_importable, sources, unrecorded_files
from shoal.integrations import load_adapter, load_pretrained, load_task
from shoal.integrations.peft import adapted_model, merged_model
from shoal.journal.view import JournalView
from shoal.look.model_card import model_card
from shoal.look.text import finite_or_none
from shoal.train.checkpoint import Weights
from shoal.train.checkpoint_paths import program_directory

__all__ = ["check_new_folder", "export_model", "export_program"]

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
        model = merged_model(model)
    saves = adapter or _saves_itself(model)
    loader = "task" if not saves else "adapter" if hasattr(model, "peft_config") else "pretrained"
    metrics = dict(weights.metrics)
    facts = _facts(journal, row, weights.epoch, metrics.get(weights.epoch, {})) | {
        "step": weights.step,
        "default_dtype": journal.spec.settings.get("default_dtype", "float32"),
        "loader": loader,
        "merged": merged,
        "bytecode": b"cloudpickle.cloudpickle" in journal.blob("task"),
    }
    library = "pytorch"
    if saves:
        inner: Any = model.get_base_model() if loader == "adapter" else model  # type: ignore[operator]
        facts["class"] = [type(inner).__module__, type(inner).__qualname__]
        facts["base_model"] = getattr(inner, "name_or_path", "") or None if loader == "adapter" else None
        module = type(model).__module__.partition(".")[0]
        library = module if module in ("peft", "transformers") else "pytorch"
    classes = {type(module).__module__.partition(".")[0] for module in model.modules()}

    def write(place: Path) -> None:
        if saves:
            facts["weights"] = "from_pretrained"
            model.save_pretrained(str(place))  # type: ignore[operator]
        else:
            facts["weights"] = _save(model, place)
            (place / "task.pkl").write_bytes(journal.blob("task"))
            if weights.carried:
                (place / "state.pkl").write_bytes(weights.carried)
        (place / "load.py").write_text(inspect.getsource(_LOADERS[loader]), encoding="utf-8")

    return _write_folder(folder, journal, facts, write, library, classes)


def export_program(journal: JournalView, row: TrialRow, folder: Path, best: int | None) -> Path:
    """Write the folder of a trial that a function or a command trained, with the files that it kept, and return it."""
    kept = program_directory(journal.directory, row.number, best)
    if not kept.is_dir() or not any(kept.iterdir()):
        raise ShoalError(
            f"trial {row.number} of the study in {journal.directory} has kept no files; let the program save its model "
            "in shoal.checkpoint() before each report"
        )
    name = kept.parent.name.partition("-")[0]
    step = int(name) if name.isdecimal() and kept.name == "files" else row.epoch
    metrics = next((report.metrics for report in journal.curve(row.number) if report.epoch == step), {})
    facts = _facts(journal, row, step, metrics) | {"loader": None, "weights": "checkpoint"}

    def write(place: Path) -> None:
        shutil.copytree(kept, place / "checkpoint", symlinks=True)

    return _write_folder(folder, journal, facts, write, "pytorch", set())


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


def _write_folder(
    folder: Path,
    journal: JournalView,
    facts: dict[str, Any],
    write: Callable[[Path], None],
    library: str,
    classes: set[str],
) -> Path:
    """Write all files; of a failure no folder is left."""
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(folder)
        texts, facts["missing"] = _write_sources(journal, folder / "source", facts["loader"])
        facts["versions"] = _versions(classes.union(*map(imported_packages, texts)))
        (folder / "trial.json").write_text(json.dumps(facts, indent=2), encoding="utf-8")
        names = sorted(path.name + "/" * path.is_dir() for path in folder.iterdir() if path.name != "README.md")
        (folder / "README.md").write_text(model_card(facts, names, library), encoding="utf-8")
    except BaseException as error:
        if made:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            text = f"{folder} cannot be written: {error}; name another folder (`directory`, --output)"
            raise ShoalError(text) from error
        raise
    return folder


def _write_sources(journal: JournalView, place: Path, loader: str | None) -> tuple[list[str], list[str]]:
    """Write the source files of the task, and return their texts, and what is missing.

    Files that the study recorded are written as they were then, others of the task's projects as they are now.
    """
    recorded, script = journal.study.get("sources", {}), journal.study.get("script")
    project = journal.spec.project
    found: dict[str, str | None] = {}
    for name, source in recorded.items():
        path = Path(name)
        found[str(path.relative_to(project)) if project else path.name] = source["text"]
    missing = []
    if script is not None:
        found.setdefault(script["name"], script["text"])
        if script["text"] is None:
            missing.append("the source of the task, which was defined in an interactive session")
    if loader is not None:
        for folder, paths in unrecorded_files(journal.blob("task"), recorded).items():
            for name, source in sources(paths).items():
                found.setdefault(str(Path(name).relative_to(folder)), source["text"])
    for name, text in found.items():
        if text is None:
            missing += [] if script is not None and name == script["name"] else [f"{name}: too long, or not UTF-8"]
            continue
        target = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8", newline="")
    return [text for text in found.values() if text is not None], missing


def _versions(packages: set[str]) -> dict[str, str]:
    """Return the versions of Python, torch and Shoal, and of the imported packages that are installed."""
    found = {"python": platform.python_version(), "torch": torch.__version__, "shoal": VERSION}
    for name in sorted(packages - found.keys()):
        try:
            found[name] = version(name)
        except PackageNotFoundError:  # the distribution has another name, or it is no package
            if isinstance(own := getattr(sys.modules.get(name), "__version__", None), str):
                found[name] = own
    return found
