"""Loads the adapter of the folder that this file was exported to: `from load import load; model = load(base=base)`.

Needs peft and transformers, but not Shoal. The base model is not in the folder.
"""

import json
from pathlib import Path

from torch import nn

__all__ = ["load"]

HERE = Path(__file__).resolve().parent


def load(device: str = "cpu", base: nn.Module | None = None) -> nn.Module:
    """Return a `peft.PeftModel` in evaluation mode.

    Args:
        base: The pretrained model without an adapter; None: it is loaded by the name that peft has recorded.

    Raises:
        ValueError: peft has recorded no name, since the base was built and not loaded.
    """
    import transformers
    from peft import PeftModel

    if base is None:
        name = json.loads((HERE / "adapter_config.json").read_text(encoding="utf-8"))["base_model_name_or_path"]
        _, cls = json.loads((HERE / "trial.json").read_text(encoding="utf-8"))["class"]
        if not name or not hasattr(transformers, cls):
            raise ValueError(f"the base model, a {cls}, has no name to load it by; build it and call load(base=base)")
        base = getattr(transformers, cls).from_pretrained(name)
    model: nn.Module = PeftModel.from_pretrained(base, str(HERE))
    return model.eval().to(device)


if __name__ == "__main__":
    print(load())
