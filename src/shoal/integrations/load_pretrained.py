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
        ImportError: a package, or a file that the study did not record is missing; the message names it.
    """
    trial = json.loads((HERE / "trial.json").read_text(encoding="utf-8"))
    module, name = trial["class"]
    sys.path.insert(0, str(HERE / "source"))
    try:
        cls = getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        missing = "; ".join(trial["missing"]) or "nothing that the study recorded"
        raise ImportError(f"{module}.{name} cannot be imported: {error}. Missing in {HERE}: {missing}") from error
    model: nn.Module = cls.from_pretrained(str(HERE))
    return model.eval().to(device)


if __name__ == "__main__":
    print(load())
