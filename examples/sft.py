"""Supervised fine-tuning as by TRL's `SFTTrainer`: eight adapters of several ranks and learning rates, at once.

    python examples/sft.py [--trials 8] [--epochs 3]

The base model and its tokenizer are made on the spot, so that nothing is downloaded; the task is to turn words around.
"""

import argparse
import random

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig

import shoal
from shoal.integrations.trl import SFTTask

WORDS = ["<pad>", "<eos>", "turn", ":", *"abcdefghij"]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def base():
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, **SIZES))


def tokenizer():
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def answers(count):
    draw = random.Random(0)
    rows = [draw.choices(WORDS[4:], k=4) for _ in range(count)]
    return Dataset.from_list([{"prompt": f"turn {' '.join(r)} :", "completion": f" {' '.join(r[::-1])}"} for r in rows])


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    data = answers(320)
    args = SFTConfig(
        num_train_epochs=options.epochs, per_device_train_batch_size=16, activation_checkpointing=False, bf16=False,
        use_cpu=True,
    )  # fmt: skip
    task = SFTTask(
        base,  # or the name of a model, whose tokenizer is then taken: SFTTask("Qwen/Qwen3-0.6B", args, ...)
        args,
        train_dataset=data.select(range(256)),
        eval_dataset=data.select(range(256, 320)),
        processing_class=tokenizer(),
        peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"),
    )
    space = {
        "r": shoal.choice([4, 8, 16]),
        "lora_alpha": shoal.choice([16, 32]),
        "learning_rate": shoal.loguniform(1e-3, 3e-2),
    }
    study = shoal.tune(
        task, space, metric="valid_loss", mode="min", algorithm=shoal.Random(options.trials, epochs=options.epochs)
    )
    best = study.best_trial
    print(f"Best: loss {best.ranked['valid_loss']:.3f} by trial {best.number}, {best.config}")
    study.best_model().save_pretrained("adapter")


if __name__ == "__main__":
    main()
