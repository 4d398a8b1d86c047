"""Loads the trained model of the folder that this file was exported to: `from load import load; model = load()`.

Needs the packages that README.md lists, but not Shoal: the class of the model reads the folder with `from_pretrained`.
If source/ defines that class, its code is run: load only folders of people you trust.
"""

import json
import sys
from importlib import import_module
from pathlib import Path

from torch import nn

__all__ = ["load"]

HERE = Path(__file__).resolve().parent


def load(device: str = "cpu") -> nn.Module:
    """Return the trained model in evaluation mode.

    Raises:
        ImportError: a package, or a file that the study did not record is missing, or another module has the name of
            one in source/; the message names it.
    """
    trial = json.loads((HERE / "trial.json").read_text(encoding="utf-8"))
    module, name = trial["class"]
    _check_modules(module.partition(".")[0])
    sys.path.insert(0, str(HERE / "source"))
    try:
        cls = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        missing = "; ".join(trial["missing"]) or "nothing that the study recorded"
        raise ImportError(f"{module}.{name} cannot be imported: {error}. Missing in {HERE}: {missing}") from error
    model: nn.Module = cls.from_pretrained(str(HERE))
    return model.eval().to(device)


def _check_modules(package: str) -> None:
    """If the class is of source/, refuse a process that has imported another module under the name of one there."""
    source = HERE / "source"
    if not (source / package).is_dir() and not (source / f"{package}.py").is_file():
        return
    for path in sorted(source.rglob("*.py")):
        name = ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is not None and (not Path(file).is_file() or Path(file).read_bytes() != path.read_bytes()):
            raise ImportError(f"a module named {name} is already imported from {file}; load {HERE} in a new process")


if __name__ == "__main__":
    print(load())
