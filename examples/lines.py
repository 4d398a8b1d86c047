"""A program that knows nothing of Shoal: it prints its reports as lines of JSON, and may be killed at any moment.

Search its arguments with

    shoal run --space examples/command.toml --metric loss --mode min --algorithm hyperband --epochs 9 \
        -- python examples/lines.py --lr {lr} --decay {decay} --out {directory}
"""

import argparse
import json
from pathlib import Path

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--decay", type=float, default=0.0)
parser.add_argument("--epochs", type=int, default=100)
parser.add_argument("--out", type=Path, required=True)
settings = parser.parse_args()

kept = settings.out / "state.json"
if kept.exists():
    state = json.loads(kept.read_text())
    print(json.dumps(state["report"]), flush=True)  # once more: a kill may have come before it was printed
else:
    state = {"x": 10.0, "report": {"step": 0}}

for step in range(state["report"]["step"] + 1, settings.epochs + 1):
    x = state["x"] - settings.lr * 0.1 * (2 * state["x"] + settings.decay)
    state = {"x": x, "report": {"loss": x * x, "step": step}}
    partial = kept.with_suffix(".partial")
    partial.write_text(json.dumps(state))
    partial.replace(kept)  # wholly or not at all, and before the report is printed
    print(json.dumps(state["report"]), flush=True)
