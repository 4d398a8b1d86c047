"""Records loss curves of real fine-tuning: low-rank adapters on a small Llama that has learnt another text.

A base learns the first half of a text, letter by letter. In each of three tasks 64 random configurations (rank, alpha,
dropout, learning rate, its schedule after a warm-up, batch size) then train adapters, each on 1920 samples, and report
the validation loss after each twentieth of these. `loss_trend.py` compares searches on the curves in
`fine_tuning_curves.json`, which this program made:

    python benchmarks/fine_tuning_curves.py [--data ../shared/data] [--trials 64] [--tasks same_author ...]
"""

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import shoal
from shoal.journal.view import JournalView

FILE = Path(__file__).with_name("fine_tuning_curves.json")
LENGTH = 64
REPORTS = 20
SAMPLES = 1920
"""Of the training of one adapter."""
VALID = 128
BASE_STEPS = 600

TASKS = {
    "same_author": ("the second half of the base's text, two passes over 960 rows", "shakespeare", 960),
    "other_text": ("an encyclopedia, two passes over 960 rows", "wikitext", 960),
    "few_samples": ("an encyclopedia, 16 passes over 120 rows", "wikitext", 120),
}
"""Name -> what the adapters learn in words, its text, and its rows."""

SPACE = {
    "r": shoal.choice([2, 4, 8, 16, 32]),
    "alpha": shoal.choice([8, 16, 32]),
    "dropout": shoal.uniform(0.0, 0.2),
    "lr": shoal.loguniform(1e-4, 5e-2),
    "schedule": shoal.choice(["constant", "linear", "cosine"]),
    "batch_size": shoal.choice([8, 16, 32]),
}
WARM_UP = 0.1
"""Share of the steps in which the learning rate rises."""


def llama() -> LlamaForCausalLM:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, use_cache=False, **sizes, **heads))


def rows_of(text: str) -> torch.Tensor:
    letters = torch.tensor([min(ord(letter), 127) for letter in text])
    return letters[: len(letters) // LENGTH * LENGTH].view(-1, LENGTH)


def texts(data: Path) -> dict[str, str]:
    """The texts of the adapters, and of the base."""
    shakespeare = (data / "tinyshakespeare.txt").read_text()
    with np.load(data / "wikitext2.npz") as file:
        words = file["vocab"].tobytes().decode().split("\n")
        wikitext = " ".join(words[number] for number in file["valid"][:40_000])
    half = len(shakespeare) // 2
    return {"base": shakespeare[:half], "shakespeare": shakespeare[half:], "wikitext": wikitext}


def factor(schedule: str, steps: int, step: int) -> float:
    """Of the learning rate in a step."""
    warm_up = max(1, round(WARM_UP * steps))
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / (steps - warm_up)
    return {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[schedule]


class Adapters(shoal.Task):
    scheduler_interval = "step"

    def __init__(self, weights: Path, train: torch.Tensor, valid: torch.Tensor) -> None:
        self.weights, self.train, self.valid = weights, train, valid

    def data(self, config: Any) -> Any:
        return TensorDataset(self.train), TensorDataset(self.valid)

    def steps_per_epoch(self, config: Any) -> int:
        return SAMPLES // REPORTS // int(config["batch_size"])

    def eval_batch_size(self, config: Any) -> int:
        return VALID

    def model(self, config: Any) -> Any:
        base = llama()
        base.load_state_dict(torch.load(self.weights))
        adapter = LoraConfig(
            task_type="CAUSAL_LM",
            r=config["r"],
            lora_alpha=config["alpha"],
            lora_dropout=config["dropout"],
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        )
        return get_peft_model(base, adapter)

    def optimizer(self, model: Any, config: Any) -> Any:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=config["lr"])

    def scheduler(self, optimizer: Any, config: Any) -> Any:
        steps, schedule = REPORTS * self.steps_per_epoch(config), config["schedule"]
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(schedule, steps, step))

    def loss(self, model: Any, batch: Any) -> Any:
        (rows,) = batch
        logits = model(input_ids=rows).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())


def base_weights(rows: torch.Tensor) -> dict[str, Any]:
    torch.manual_seed(0)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(BASE_STEPS):
        batch = rows[torch.randint(len(rows), (16,))]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"base: loss {loss:.3f} after {BASE_STEPS} steps", flush=True)
    weights: dict[str, Any] = model.state_dict()
    return weights


def rounded(value: Any) -> Any:
    """To six digits; None in place of a loss that is not finite, which JSON lacks."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[1] / "../shared/data")
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--file", type=Path, default=FILE)
    options = parser.parse_args()
    rows = {name: rows_of(text) for name, text in texts(options.data).items()}
    found = json.loads(options.file.read_text()) if options.file.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "base.pt"
        torch.save(base_weights(rows["base"]), weights)
        for name in options.tasks:
            words, text, count = TASKS[name]
            task = Adapters(weights, rows[text][:count], rows[text][count : count + VALID])
            study = shoal.tune(
                task,
                SPACE,
                metric="valid_loss",
                mode="min",
                algorithm=shoal.Random(options.trials, epochs=REPORTS),
                directory=Path(folder) / name,
            )
            with JournalView.read(study.directory) as journal:
                curves = [journal.curve(trial.number) for trial in study.trials]
            trials = []
            for trial, curve in zip(study.trials, curves, strict=True):
                losses = [rounded(report.metrics["valid_loss"]) for report in curve]
                config = {key: rounded(value) for key, value in trial.config.items()}
                trials.append({"config": config, "losses": losses})
            found[name] = {"text": words, "trials": trials}
            rest = ",\n".join(json.dumps(key) + ": " + table_json(table) for key, table in found.items())
            options.file.write_text("{\n" + rest + "\n}\n")
            print(f"{name}: best {study.best_trial.metrics['valid_loss']:.4f}", flush=True)


def table_json(table: dict[str, Any]) -> str:
    lines = ",\n".join(map(json.dumps, table["trials"]))
    return f'{{"text": {json.dumps(table["text"])}, "trials": [\n{lines}\n]}}'


if __name__ == "__main__":
    main()
