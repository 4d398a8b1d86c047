"""Records `fine_tuning_curves.json`: loss curves of low-rank adapters on a small Llama that has learnt another text.

A base learns the first half of a text, letter by letter. In each of three tasks 64 random configurations then train
adapters, each on 1920 samples, and report the validation loss after each twentieth of these; null where it diverged.
`regret.py` compares searches on the curves.

    python benchmarks/fine_tuning_curves.py [--data DIR] [--trials 64] [--file benchmarks/fine_tuning_curves.json]
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

LENGTH, REPORTS, SAMPLES, VALID = 64, 20, 1920, 128
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


def llama() -> LlamaForCausalLM:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))


def rows_of(data: Path) -> dict[str, torch.Tensor]:
    """Rows of letters of the base's text and of those of the adapters."""
    shakespeare = (data / "tinyshakespeare.txt").read_text()
    with np.load(data / "wikitext2.npz") as file:
        words = file["vocab"].tobytes().decode().split("\n")
        wikitext = " ".join(words[number] for number in file["valid"][:40_000])
    half = len(shakespeare) // 2
    found = {}
    for name, text in {"base": shakespeare[:half], "shakespeare": shakespeare[half:], "wikitext": wikitext}.items():
        letters = torch.tensor([min(ord(letter), 127) for letter in text])
        found[name] = letters[: len(letters) // LENGTH * LENGTH].view(-1, LENGTH)
    return found


def factor(schedule: str, steps: int, step: int) -> float:
    """Return the factor of the learning rate, which rises in the first tenth of the steps."""
    warm_up = max(1, round(0.1 * steps))
    done = (step - warm_up) / (steps - warm_up)
    later = {"constant": 1.0, "linear": 1 - done, "cosine": (1 + math.cos(math.pi * done)) / 2}[schedule]
    return (step + 1) / warm_up if step < warm_up else later


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
        parts = ["q_proj", "k_proj", "v_proj", "o_proj"]
        settings = {"r": config["r"], "lora_alpha": config["alpha"], "lora_dropout": config["dropout"]}
        return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=parts, **settings))

    def optimizer(self, model: Any, config: Any) -> Any:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=config["lr"])

    def scheduler(self, optimizer: Any, config: Any) -> Any:
        steps, schedule = REPORTS * self.steps_per_epoch(config), config["schedule"]
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: factor(schedule, steps, step))

    def loss(self, model: Any, batch: Any) -> Any:
        (rows,) = batch
        logits = model(input_ids=rows).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())


def save_base(rows: torch.Tensor, file: Path) -> None:
    torch.manual_seed(0)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(600):
        batch = rows[torch.randint(len(rows), (16,))]
        optimizer.zero_grad()
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), file)


def rounded(value: Any) -> Any:
    """To six digits; None in place of a loss that is not finite, which JSON lacks."""
    if not isinstance(value, float):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--data", type=Path, default=Path(__file__).parents[1] / "../shared/data")
    parser.add_argument("--trials", type=int, default=64)
    parser.add_argument("--file", type=Path, default=Path(__file__).with_name("fine_tuning_curves.json"))
    options = parser.parse_args()
    rows, tables = rows_of(options.data), []
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "base.pt"
        save_base(rows["base"], weights)
        for name, (words, text, count) in TASKS.items():
            task = Adapters(weights, rows[text][:count], rows[text][count : count + VALID])
            algorithm, directory = shoal.Random(options.trials, epochs=REPORTS), Path(folder) / name
            study = shoal.tune(task, SPACE, metric="valid_loss", mode="min", algorithm=algorithm, directory=directory)
            lines = []
            with JournalView.read(study.directory) as journal:
                for trial in study.trials:
                    losses = [rounded(report.metrics["valid_loss"]) for report in journal.curve(trial.number)]
                    config = {key: rounded(value) for key, value in trial.config.items()}
                    lines.append(json.dumps({"config": config, "losses": losses}))
            trials = ",\n".join(lines)
            tables.append(f'{json.dumps(name)}: {{"text": {json.dumps(words)}, "trials": [\n{trials}\n]}}')
    options.file.write_text("{\n" + ",\n".join(tables) + "\n}\n")


if __name__ == "__main__":
    main()
