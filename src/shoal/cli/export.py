"""`shoal export`: write the trained weights of one trial for use without Shoal."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.options import AsJson, StudyDirectory, print_json, print_message
from shoal.core.errors import ShoalError
from shoal.results import Study

if TYPE_CHECKING:
    from torch import nn

__all__ = ["export"]


def export(
    directory: StudyDirectory,
    trial: Annotated[int, typer.Argument(help="Number of the trial, as in `shoal trials` and `shoal best`.")],
    output: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder to write; by default DIR/export/TRIAL.")
    ] = None,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write the adapter of peft alone.")] = False,
    as_json: AsJson = False,
) -> None:
    """Export the trained model of a trial for use without Shoal.

    A model of transformers or peft writes a folder that `from_pretrained` reads. Any other model's state dict is
    written as model.pt, for `torch.load`. With --adapter only the adapter is written, for `PeftModel.from_pretrained`.
    """
    model = Study(directory).model(trial)
    folder = output or directory / "export" / str(trial)
    if folder.exists() and any(folder.iterdir()):
        raise ShoalError(f"{folder} is not empty; name another folder by --output")
    try:
        files = _write(model, folder, adapter)
    except OSError as error:
        raise ShoalError(f"{folder} cannot be written: {error}; name another folder by --output") from error
    if as_json:
        print_json({"directory": str(directory), "trial": trial, "files": [str(path) for path in files]})
        return
    for path in files:
        print_message(f"written: {path}")


def _write(model: "nn.Module", folder: Path, adapter: bool) -> list[Path]:
    """Write a model, or its adapter, to a folder; returns the files."""
    if adapter:
        from shoal.integrations.peft import save_adapter

        return save_adapter(model, folder)
    folder.mkdir(parents=True, exist_ok=True)
    if callable(save := getattr(model, "save_pretrained", None)):
        save(str(folder))
    else:
        import torch

        torch.save(model.state_dict(), folder / "model.pt")
    return sorted(path for path in folder.rglob("*") if path.is_file())
