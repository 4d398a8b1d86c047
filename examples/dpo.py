"""Direct preference optimisation as by TRL's `DPOTrainer`: eight adapters of several betas and losses, at once.

    python examples/dpo.py [--trials 8] [--epochs 3]

The base model and its tokenizer are made on the spot, so that nothing is downloaded. Answers in the order of the
alphabet are preferred. The reference, the base without an adapter, is computed once for all trials.
"""

import argparse
import random

from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig

import shoal
from shoal.integrations.trl import DPOTask

WORDS = ["<pad>", "<eos>", "sort", ":", *"abcdefghij"]
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def base():
    return LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, **SIZES))


def tokenizer():
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>")


def preferences(count):
    draw = random.Random(0)
    rows = [draw.sample(WORDS[4:], k=4) for _ in range(count)]
    chosen, rejected = ([" " + " ".join(sorted(row, reverse=turned)) for row in rows] for turned in (False, True))
    prompts = [f"sort {' '.join(row)} :" for row in rows]
    return Dataset.from_dict({"prompt": prompts, "chosen": chosen, "rejected": rejected})


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    data = preferences(192)
    args = DPOConfig(
        num_train_epochs=options.epochs, per_device_train_batch_size=16, activation_checkpointing=False, bf16=False,
        use_cpu=True,
    )  # fmt: skip
    task = DPOTask(
        base,  # or the name of a model, whose tokenizer is then taken: DPOTask("Qwen/Qwen3-0.6B", args=args, ...)
        args=args,
        train_dataset=data.select(range(128)),
        eval_dataset=data.select(range(128, 192)),
        processing_class=tokenizer(),
        peft_config=LoraConfig(task_type="CAUSAL_LM", target_modules="all-linear"),
    )
    space = {
        "beta": shoal.loguniform(0.05, 0.5),
        "loss_type": shoal.choice(["sigmoid", "ipo"]),
        "r": shoal.choice([4, 8, 16]),
        "learning_rate": shoal.loguniform(1e-4, 1e-2),
    }
    study = shoal.tune(
        task, space, metric="rewards/accuracies", mode="max",
        algorithm=shoal.Random(options.trials, epochs=options.epochs),
    )  # fmt: skip
    best = study.best_trial
    print(f"Best: accuracy {best.ranked['rewards/accuracies']:.3f} by trial {best.number}, {best.config}")
    study.best_model().save_pretrained("adapter")


if __name__ == "__main__":
    main()
