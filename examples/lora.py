"""Sixteen low-rank adapters by `peft` on one small Llama: several ranks, alphas and learning rates, one array.

    python examples/lora.py [--text ../shared/data/tinyshakespeare.txt] [--steps 200] [--trials 16] [--epochs 3]

A base model learns the first half of a text, letter by letter. Then adapters of it learn the second half.
"""

import argparse
import tempfile
from pathlib import Path

import torch
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

import shoal

LENGTH = 64
SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def llama():
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, use_cache=False, **SIZES))


def lines(text):
    """A text in rows of equal length, as numbers of its letters."""
    letters = torch.tensor([min(ord(letter), 127) for letter in text])
    return letters[: len(letters) // LENGTH * LENGTH].view(-1, LENGTH)


class Adapters(shoal.Task):
    def __init__(self, weights, rows):
        self.weights = weights
        self.rows = rows

    def data(self, config):
        held_out = len(self.rows) // 8
        return TensorDataset(self.rows[:-held_out]), TensorDataset(self.rows[-held_out:])

    def base(self, config):  # once in each process; all adapters use its memory
        base = llama()
        base.load_state_dict(torch.load(self.weights))
        return base

    def model(self, config, base):
        adapter = LoraConfig(
            task_type="CAUSAL_LM",
            r=config["r"],
            lora_alpha=config["alpha"],
            lora_dropout=config["dropout"],
            target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        )
        return get_peft_model(base, adapter)

    def optimizer(self, model, config):
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=config["lr"])

    def loss(self, model, batch):
        (rows,) = batch
        logits = model(input_ids=rows).logits
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())


SPACE = {
    "r": shoal.choice([2, 4, 8, 16]),
    "alpha": shoal.choice([8, 16, 32]),
    "dropout": shoal.uniform(0.0, 0.2),
    "lr": shoal.loguniform(1e-4, 1e-2),
    "batch_size": 16,
}


def pretrain(rows, steps):
    torch.manual_seed(0)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = rows[torch.randint(len(rows), (16,))]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"The base model: loss {loss:.3f} after {steps} steps.")
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "../shared/data/tinyshakespeare.txt")
    parser.add_argument("--steps", type=int, default=200, help="of the base model")
    parser.add_argument("--trials", type=int, default=16)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    rows = lines(options.text.read_text())
    half = len(rows) // 2
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "base.pt"
        torch.save(pretrain(rows[:half], options.steps).state_dict(), weights)
        study = shoal.tune(
            Adapters(weights, rows[half : half + 512]), SPACE, metric="valid_loss", mode="min",
            algorithm=shoal.Random(options.trials, epochs=options.epochs),
        )  # fmt: skip
        best = study.best_trial
        print(f"Best of {len(study.trials)} adapters: loss {best.ranked['valid_loss']:.3f} by trial {best.number}")
        for name, value in best.config.items():
            print(f"  {name} = {value:.4g}" if isinstance(value, float) else f"  {name} = {value}")
        model = study.best_model()  # a PeftModel
        model.save_pretrained("adapter")
        print(
            f"Its adapter, of {sum(p.numel() for p in model.parameters() if p.requires_grad)} weights, is in adapter/."
        )


if __name__ == "__main__":
    main()
