"""All searches of the benchmark by name, in full and in their smallest versions."""

import shoal
from search_tasks import gpu, pictures, tabular, text, tuning
from search_tasks.search import Search
from shoal import Hyperband, Random, SuccessiveHalving

__all__ = ["OTHERS", "SEARCHES"]

RATE = shoal.loguniform(1e-4, 1e-2)
LOSS = {"metric": "valid_loss", "mode": "min"}
BERT = "transformers:BertConfig,BertForSequenceClassification"
TABLES = "sklearn.datasets:load_digits,make_classification"
LLAMA = "transformers:LlamaConfig,LlamaForCausalLM"
PEFT = "peft:LoraConfig,get_peft_model"

SEARCHES: dict[str, Search] = {
    "tabular": Search(
        lambda data, quick: tabular.Tabular(500 if quick else 8000),
        {"lr": RATE, "width": shoal.choice([64, 128, 256]), "batch_size": shoal.choice([32, 64]), "weight_decay": 0.01},
        lambda: Random(32, epochs=8),
        lambda: Random(4, epochs=1),
        imports=(TABLES,),
    ),
    "tabular, halving": Search(
        lambda data, quick: tabular.Tabular(500 if quick else 12000),
        {"lr": RATE, "width": shoal.choice([64, 128, 256]), "batch_size": 64},
        lambda: SuccessiveHalving(n=81, max_epochs=27, eta=3),
        lambda: SuccessiveHalving(n=4, max_epochs=2, eta=2),
        imports=(TABLES,),
    ),
    "200 linear": Search(
        lambda data, quick: tabular.Linear(),
        {"lr": shoal.loguniform(1e-3, 1.0), "momentum": shoal.uniform(0.0, 0.95), "batch_size": 32},
        lambda: Random(200, epochs=10),
        lambda: Random(8, epochs=1),
        imports=(TABLES,),
    ),
    "MNIST CNN": Search(
        lambda data, quick: pictures.Convolutional(data / pictures.MNIST, *((128, 100) if quick else (5000, 1000))),
        {"lr": RATE, "width": shoal.choice([8, 16]), "batch_size": 50},
        lambda: Random(16, epochs=3),
        file=pictures.MNIST,
    ),
    "CIFAR CNN, halving": Search(
        lambda data, quick: pictures.Convolutional(data / pictures.CIFAR, *((128, 100) if quick else (5000, 1000))),
        {"lr": RATE, "width": shoal.choice([8, 16]), "weight_decay": shoal.loguniform(1e-4, 1e-1), "batch_size": 50},
        lambda: SuccessiveHalving(n=27, max_epochs=9, eta=3),
        lambda: SuccessiveHalving(n=2, max_epochs=2, eta=2),
        file=pictures.CIFAR,
        tolerance=0.03,
    ),
    "ViT": Search(
        lambda data, quick: pictures.Transformer(data / pictures.CIFAR, *((32, 50) if quick else (1000, 250))),
        {"lr": RATE, "width": 64, "depth": shoal.choice([2, 3]), "batch_size": 50},
        lambda: Random(10, epochs=3),
        file=pictures.CIFAR,
        tolerance=0.03,
    ),
    "autoencoder": Search(
        lambda data, quick: pictures.Autoencoder(data / pictures.MNIST, *((128, 100) if quick else (5000, 1000))),
        {"lr": RATE, "latent": shoal.choice([8, 16, 32]), "batch_size": 50},
        lambda: Random(24, epochs=5),
        **LOSS,
        file=pictures.MNIST,
    ),
    "GAN": Search(
        lambda data, quick: pictures.GAN(data / pictures.MNIST, 128 if quick else 3000),
        {"lr": shoal.loguniform(1e-4, 1e-3), "beta": shoal.uniform(0.3, 0.9), "width": 128, "batch_size": 50},
        lambda: Random(16, epochs=6),
        metric="gap",
        mode="min",
        file=pictures.MNIST,
        tolerance=0.05,
    ),
    "6 perceptrons": Search(
        lambda data, quick: pictures.Perceptron(data / pictures.MNIST, *((128, 100) if quick else (20000, 2000))),
        {"lr": RATE, "width": 256, "batch_size": 64},
        lambda: Random(6, epochs=6),
        file=pictures.MNIST,
    ),
    "LSTM": Search(
        lambda data, quick: text.LSTM(data / text.SHAKESPEARE, *((32, 16, 16) if quick else (1500, 200, 50))),
        {"lr": shoal.loguniform(1e-3, 1e-2), "width": shoal.choice([64, 128]), "batch_size": 25},
        lambda: Random(8, epochs=3),
        **LOSS,
        file=text.SHAKESPEARE,
        tolerance=0.05,
    ),
    "GPT, halving": Search(
        lambda data, quick: text.GPT(data / text.SHAKESPEARE, *((32, 16, 16) if quick else (500, 100, 64))),
        {"lr": RATE, "width": shoal.choice([64, 96]), "batch_size": 20},
        lambda: SuccessiveHalving(n=18, max_epochs=9, eta=3),
        lambda: SuccessiveHalving(n=2, max_epochs=2, eta=2),
        **LOSS,
        file=text.SHAKESPEARE,
        tolerance=0.05,
    ),
    "LoRA": Search(
        lambda data, quick: text.Adapters(data / text.SHAKESPEARE, *((8, 8, 16) if quick else (256, 64, 64))),
        {"lr": RATE, "rank": shoal.choice([4, 8, 16]), "batch_size": 8},
        lambda: Random(8, epochs=3),
        **LOSS,
        file=text.SHAKESPEARE,
        imports=(LLAMA, PEFT),
        tolerance=0.05,
    ),
    "BERT-Tiny": Search(
        lambda data, quick: text.Reviews(data / text.REVIEWS, *((16, 16, 8) if quick else (600, 150, 48))),
        {"lr": shoal.loguniform(1e-4, 1e-3), "weight_decay": shoal.loguniform(1e-4, 1e-1), "batch_size": 20},
        lambda: Random(8, epochs=3),
        file=text.REVIEWS,
        imports=(BERT,),
        tolerance=0.06,
    ),
}
"""Those whose mean is judged."""


def _pointnet(algorithm):
    space = tuning.SPACE | {"batch_size": shoal.choice([8, 16, 32]), "transform": shoal.choice([False, True])}
    return Search(
        lambda data, quick: tuning.PointNet(*((16, 16) if quick else (384, 128))), space, algorithm, tolerance=0.15
    )


def _mobilenet(algorithm):
    space = tuning.SPACE | {"batch_size": shoal.choice([4, 8]), "version": shoal.choice(["V2", "V3-Large"])}
    return Search(
        lambda data, quick: tuning.MobileNet(data / pictures.CIFAR, *((16, 16) if quick else (128, 64))),
        space,
        algorithm,
        file=pictures.CIFAR,
        tolerance=0.15,
    )


def _perceptrons(repeats):
    return Search(
        lambda data, quick: tabular.Tabular(500 if quick else 4000),
        {"lr": RATE, "width": shoal.choice([64, 128, 256]), "batch_size": 32},
        lambda: Random(32, epochs=4),
        imports=(TABLES,),
        repeats=repeats,
    )


def _resnets(algorithm, **asked):
    return Search(
        lambda data, quick: gpu.ResNet(data / pictures.CIFAR, *((24, 8, 8) if quick else (5000, 1000, 64))),
        {"lr": shoal.loguniform(1e-3, 1e-1), "batch_size": 64},
        algorithm,
        **LOSS,
        file=pictures.CIFAR,
        asked={name.replace("_", " "): most for name, most in asked.items()},
    )


OTHERS: dict[str, Search] = {
    "PointNet, random": _pointnet(lambda: Random(60, epochs=2)),
    "PointNet, Hyperband": _pointnet(lambda: Hyperband(max_epochs=25, eta=5, skip_last=1)),
    "MobileNet, random": _mobilenet(lambda: Random(50, epochs=1)),
    "MobileNet, Hyperband": _mobilenet(lambda: Hyperband(max_epochs=9, eta=3, skip_last=1)),
    "32 perceptrons": _perceptrons(1),
    "32 perceptrons, five seeds": _perceptrons(5),
    "8 ResNet-18": _resnets(lambda: Random(8, epochs=2), empty_of_plain=0.6, overhead_of_full_of_empty=0.5),
    "32 ResNet-18": _resnets(
        lambda: Random(32, epochs=2), empty_of_plain=0.35, empty_of_pool=0.7, overhead_of_full_of_empty=0.5
    ),
    "8 ResNet-18, halving": _resnets(lambda: SuccessiveHalving(n=8, max_epochs=4, eta=2)),
    "32 ResNet-18, halving": _resnets(lambda: SuccessiveHalving(n=32, max_epochs=4, eta=2)),
    "64 perceptrons": Search(
        lambda data, quick: gpu.Rows(80 if quick else 10000),
        {"lr": RATE, "width": 128, "batch_size": 64},
        lambda: Random(64, epochs=2),
        **LOSS,
    ),
    "24 BERT-Tiny": Search(
        lambda data, quick: gpu.Sentences(data, *((16, 4, 48) if quick else (2000, 500, 48))),
        {"lr": shoal.loguniform(1e-4, 1e-3), "batch_size": 32},
        lambda: Random(24, epochs=2),
        **LOSS,
        imports=(BERT,),
    ),
}
"""The study of HFTA's tuner HFHT, several seeds of each configuration, and, from "8 ResNet-18" on, those for a GPU."""
