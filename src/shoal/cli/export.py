"""The command `shoal export`."""

from pathlib import Path
from typing import Annotated

import typer

from shoal.cli.options import AsJson, StudyDirectory, print_json, print_message
from shoal.journal.check import named_trials
from shoal.journal.view import JournalView
from shoal.results import Study

__all__ = ["export"]


def export(
    directory: StudyDirectory,
    trials: Annotated[list[int], typer.Argument(help="Numbers of trials, as in `shoal trials` and `shoal best`.")],
    output: Annotated[
        Path | None,
        typer.Option(
            file_okay=False,
            help="Folder to write, with one in it for each of several trials; by default DIR/export/TRIAL.",
        ),
    ] = None,
    last: Annotated[bool, typer.Option("--last", help="Write the newest weights instead of the best.")] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="Write the adapter of peft alone.")] = False,
    merged: Annotated[bool, typer.Option("--merged", help="Merge the adapter of peft into its base model.")] = False,
    as_json: AsJson = False,
) -> None:
    """Export trained models as folders, to be loaded without the study.

    A folder holds the weights, load.py with a function that returns the model, the source of the task, trial.json with
    the config, seeds, metrics and versions, and README.md, a model card. A model of transformers or peft is written for
    `from_pretrained`; any other one as model.safetensors, or as model.pt without safetensors. Of a function or command
    the folder holds the files that it kept. With --adapter only the adapter is written, for `PeftModel.from_pretrained`
    and servers of several adapters on one base; with --merged the model with its adapter merged into the weights.

    This runs code from the study's directory, the pickled task: export only trials of people you trust.
    """
    from shoal.integrations.model_folder import check_new_folder  # imports torch, which other commands do not need

    study = Study(directory)
    with JournalView.read(directory) as journal:
        named_trials(journal, trials)
    folders = {trial: directory / "export" / str(trial) for trial in trials}
    if output is not None:
        folders = {trial: output / str(trial) if len(folders) > 1 else output for trial in trials}
    for folder in folders.values():
        check_new_folder(folder)  # before any trial is written
    files: dict[int, list[str]] = {}
    for trial, folder in folders.items():
        study.export(trial, folder, which="last" if last else "best", adapter=adapter, merged=merged)
        files[trial] = [str(path) for path in sorted(folder.rglob("*")) if path.is_file()]
        if not as_json:
            names = ", ".join(sorted(path.name for path in folder.iterdir()))
            print_message(f"written: {folder} ({names})")
    if as_json:
        print_json({"directory": str(directory), "files": files})
