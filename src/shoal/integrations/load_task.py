"""Loads the trained model of the folder that this file was exported to: `from load import load; model = load()`.

Needs Shoal, as the class of the task derives from `shoal.Task`, and the packages that README.md lists. The method
`model` of the task builds the model, which then gets the weights. So this runs the code of source/ and task.pkl: load
only folders of people you trust. Imports of the task resolve to source/ first.
"""

import json
import pickle
import platform
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["load"]

HERE = Path(__file__).resolve().parent


def load(device: str = "cpu") -> nn.Module:
    """Return the trained model in evaluation mode.

    Raises:
        ImportError: Shoal, a package, or a file that the study did not record is missing, or another module has the
            name of one in source/; the message names it.
        RuntimeError: task.pkl holds the bytecode of another version of Python.
    """
    trial = json.loads((HERE / "trial.json").read_text(encoding="utf-8"))
    _check(trial)
    _check_modules(trial["script"])
    sys.path.insert(0, str(HERE / "source"))
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, trial["default_dtype"]))
    try:
        with torch.random.fork_rng(devices=[]):
            return _loaded(trial).eval().to(device)
    except (ImportError, AttributeError) as error:
        missing = "; ".join(trial["missing"]) or "nothing that the study recorded"
        raise ImportError(f"the task cannot be loaded: {error}. Missing in {HERE}: {missing}") from error
    finally:
        torch.set_default_dtype(before)


def _check(trial: dict[str, Any]) -> None:
    versions = trial["versions"]
    if find_spec("shoal") is None:
        raise ImportError(f"a task of Shoal builds the model, so load.py needs Shoal {versions['shoal']}; install it")
    if trial["bytecode"] and versions["python"].split(".")[:2] != platform.python_version().split(".")[:2]:
        raise RuntimeError(
            f"task.pkl holds the bytecode of Python {versions['python']}, and this is {platform.python_version()}; run "
            "load.py with that version, or copy the classes from source/ and load the weights into the model"
        )


def _check_modules(script: str | None) -> None:
    """Refuse a process that has imported another module under the name of one in source/, but for the script."""
    source = HERE / "source"
    for path in sorted(set(source.rglob("*.py")) - {source / (script or "")}):
        name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and (not Path(file).is_file() or Path(file).read_bytes() != path.read_bytes()):
            raise ImportError(f"a module named {name} is already imported from {file}; load {HERE} in a new process")


def _loaded(trial: dict[str, Any]) -> nn.Module:
    from shoal.train.carried_state import CarriedState

    task = pickle.loads((HERE / "task.pkl").read_bytes())
    base = task.base(trial["config"])
    model: nn.Module = task.model(trial["config"], *(() if base is None else (base.requires_grad_(False),)))
    carried = CarriedState(task, model, None, None, torch.device("cpu"))
    state = HERE / "state.pkl"  # attributes of modules that training changed
    if trial["merged"]:
        from shoal.integrations.peft import merged_model

        carried.restore(state.read_bytes() if state.exists() else b"")  # the merge changes the paths of modules
        model = merged_model(model)
    if (HERE / "model.safetensors").exists():
        from safetensors.torch import load_model

        load_model(model, HERE / "model.safetensors")
    else:
        model.load_state_dict(torch.load(HERE / "model.pt", map_location="cpu", weights_only=True))
    if state.exists() and not trial["merged"]:
        carried.restore(state.read_bytes())
    return model


if __name__ == "__main__":
    print(load())
