"""The model card of an exported trial: README.md in Markdown, with the metadata of the Hugging Face Hub."""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from shoal.core.space import flatten
from shoal.look.text import number_text, printable

__all__ = ["model_card"]

_MARKUP = re.compile(r"([\\`*\[\]<>|~&])")


def model_card(facts: Mapping[str, Any], files: Iterable[str]) -> str:
    """Return the text of README.md.

    Args:
        facts: The content of trial.json.
        files: Names of the files and folders beside it.
    """
    title = f"{_text(facts['task'])}: trial {facts['trial']} of the study {_text(facts['study'])}"
    parts = [
        _metadata(facts),
        f"# {title}\n\n{_what(facts)}",
        f"## Configuration\n\n{_table(('name', 'value'), flatten(facts['config']).items())}",
        f"## Metrics\n\n{_metrics(facts)}",
        f"## Training\n\n{_training(facts)}",
        f"## Loading\n\n{_loading(facts)}",
        f"## Reproducing\n\n{_reproducing(facts)}",
        f"## Files\n\n{_files(facts, files)}",
    ]
    return "\n\n".join(parts) + "\n"


def _metadata(facts: Mapping[str, Any]) -> str:
    """Return the front matter; its values are JSON, which is YAML."""
    values = {name: value for name, value in facts["metrics"].items() if value is not None}
    metrics = [{"type": printable(name), "value": value} for name, value in values.items()]
    task = {"type": "other", "name": printable(facts["task"])}
    data = {"type": "other", "name": f"validation set of {printable(facts['task'])}"}
    name = f"{printable(facts['study'])}, trial {facts['trial']}"
    index = [{"name": name, "results": [{"task": task, "dataset": data, "metrics": metrics}]}] if metrics else []
    fields = {"library_name": facts["library"], "tags": ["shoal"], "model-index": index}
    if base := facts.get("base_model"):
        fields["base_model"] = printable(base)
    lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in fields.items() if value]
    return "\n".join(["---", *lines, "---"])


def _what(facts: Mapping[str, Any]) -> str:
    goals = ", ".join(f"{_text(goal['metric'])} ({goal['mode']})" for goal in facts["goals"])
    rank = f"ranks {facts['rank']} of {facts['of']}" if facts["rank"] else "has no rank"
    ranked = f"The trial {rank} by {goals}."
    if (repeats := facts["trials_of_configuration"]) > 1:
        ranked = f"Its configuration {rank} by the {facts['aggregate']} of its {repeats} trials of {goals}."
    what = "Files" if facts["loader"] is None else "Weights"
    steps = f" and {facts['step']} steps" if facts.get("step") else ""
    done = f"{_epochs(facts, facts['epoch'])}{steps}"
    return f"{what} of trial {facts['trial']} after {done}. {ranked}"


def _epochs(facts: Mapping[str, Any], number: int) -> str:
    return f"{number} {facts['unit']}{'' if number == 1 else 's'}"


def _metrics(facts: Mapping[str, Any]) -> str:
    columns = {f"these ({facts['unit']} {facts['epoch']})": facts["metrics"]}
    for name in ("best", "last"):
        if facts[name]["epoch"]:
            columns[f"{name} ({facts['unit']} {facts[name]['epoch']})"] = facts[name]["metrics"]
    names = dict.fromkeys(name for metrics in columns.values() for name in metrics)
    if not names:
        return "None was reported."
    return _table(("metric", *columns), [(name, *(each.get(name) for each in columns.values())) for name in names])


def _training(facts: Mapping[str, Any]) -> str:
    rows: list[tuple[str, Any]] = [
        ("trained", f"{_epochs(facts, facts['last']['epoch'])} on {facts['device'] or 'no device'}"),
        ("seconds", facts["seconds"]),
        ("study begun with", f"Shoal {facts['shoal']}"),
    ]
    if facts["loader"] is not None:  # a program does with its seed as it likes
        rows.append(("seed of weights and dropout", facts["seed"]))
        rows.append(("seed of the order of samples", facts["data_seed"]))
    if facts["origin"] is not None:
        rows.append(("began from", f"trial {facts['origin']['trial']} at epoch {facts['origin']['epoch']}"))
    rows += [(f"{name}, when exported", version) for name, version in facts["versions"].items()]
    return _table(("what", "value"), rows)


def _loading(facts: Mapping[str, Any]) -> str:
    if facts["loader"] is None:
        return (
            "Shoal does not know how a program builds its model. `checkpoint/` holds the files that the program kept; "
            "load them as the program does."
        )
    needs = {
        "task": "It needs Shoal, as the class of the task derives from `shoal.Task`. It runs the code of `task.pkl` "
        "and `source/`: load only models of people you trust.",
        "pretrained": "It needs no Shoal: `from_pretrained` of the model's class reads the folder.",
        "adapter": "It needs peft and the base model, but no Shoal. Call `load(base=model)` for a base without a name.",
    }[facts["loader"]]
    call = 'model = load()  # or load(device="cuda"); an ordinary torch.nn.Module in evaluation mode'
    return f"```python\nfrom load import load  # in this folder\n\n{call}\n```\n\n{needs} A process loads one folder."


def _reproducing(facts: Mapping[str, Any]) -> str:
    if facts["loader"] is None:
        return f"Start the program with this configuration and the seed {facts['seed']}."
    return (
        f"```sh\n{printable(facts['rerun'])}\n```\n\nThis trains the trial again with its own seeds, and compares the "
        "metrics with those recorded. It needs the directory of the study."
    )


def _files(facts: Mapping[str, Any], files: Iterable[str]) -> str:
    lines = [f"- {_text(name)}" for name in files]
    if facts["missing"]:
        lines += ["", "Not in this folder:", "", *(f"- {_text(each)}" for each in facts["missing"])]
    return "\n".join(lines)


def _table(header: Iterable[str], rows: Iterable[Iterable[Any]]) -> str:
    lines = [list(map(_cell, header)), *(list(map(_cell, row)) for row in rows)]
    lines.insert(1, ["---"] * len(lines[0]))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    return _text(number_text(value))


def _text(text: str) -> str:
    """Return a text that Markdown and HTML show as it is, in one line."""
    return _MARKUP.sub(r"\\\1", printable(text))
