"""Handwritten digits: eight trainings of a small vision transformer, at once, each as `transformers.Trainer` does it.

    python examples/trainer.py [--trials 8] [--epochs 3]

The best model is written to best/ as `save_pretrained` writes it.
"""

import argparse

from sklearn.datasets import load_digits
from transformers import TrainingArguments, ViTConfig, ViTForImageClassification

import shoal
from shoal.integrations.transformers import TrainerTask

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def model_init():
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=2, num_channels=1, num_labels=10, **SIZES))


def digits():
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).astype("float32") / 16
    return [{"pixel_values": image, "labels": int(label)} for image, label in zip(images, labels, strict=True)]


def accuracy(prediction):
    return {"accuracy": float((prediction.predictions.argmax(-1) == prediction.label_ids).mean())}


SPACE = {
    "learning_rate": shoal.loguniform(1e-4, 1e-2),
    "weight_decay": shoal.loguniform(1e-4, 1e-1),
    "warmup_steps": shoal.choice([0, 20]),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    options = parser.parse_args()
    samples = digits()
    args = TrainingArguments(
        num_train_epochs=options.epochs, per_device_train_batch_size=32, lr_scheduler_type="cosine",
        eval_strategy="epoch", save_strategy="no",
    )  # fmt: skip
    task = TrainerTask(model_init, args, samples[:1500], samples[1500:], compute_metrics=accuracy)
    study = shoal.tune(
        task, SPACE, metric="accuracy", mode="max", algorithm=shoal.Random(options.trials, epochs=options.epochs)
    )
    best = study.best_trial
    print(f"Best: accuracy {best.ranked['accuracy']:.3f} by trial {best.number}")
    for name, value in best.config.items():
        print(f"  {name} = {value:.4g}")
    study.best_model().save_pretrained("best")


if __name__ == "__main__":
    main()
