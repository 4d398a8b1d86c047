"""All searches of the benchmark by name, in full and in their smallest versions."""

import shoal
from search_tasks import pictures, tabular, text
from search_tasks.search import Search
from shoal import Random, SuccessiveHalving

__all__ = ["SEARCHES"]

RATE = shoal.loguniform(1e-4, 1e-2)
BERT = "transformers:BertConfig,BertForSequenceClassification"
LLAMA = "transformers:LlamaConfig,LlamaForCausalLM"
PEFT = "peft:LoraConfig,get_peft_model"

SEARCHES: dict[str, Search] = {
    "tabular": Search(
        lambda data, quick: tabular.Tabular(500 if quick else 8000),
        {"lr": RATE, "width": shoal.choice([64, 128, 256]), "batch_size": shoal.choice([32, 64]), "weight_decay": 0.01},
        lambda: Random(32, epochs=8),
        lambda: Random(4, epochs=1),
    ),
    "tabular, halving": Search(
        lambda data, quick: tabular.Tabular(500 if quick else 12000),
        {"lr": RATE, "width": shoal.choice([64, 128, 256]), "batch_size": 64},
        lambda: SuccessiveHalving(n=81, max_epochs=27, eta=3),
        lambda: SuccessiveHalving(n=4, max_epochs=2, eta=2),
    ),
    "200 linear": Search(
        lambda data, quick: tabular.Linear(),
        {"lr": shoal.loguniform(1e-3, 1.0), "momentum": shoal.uniform(0.0, 0.95), "batch_size": 32},
        lambda: Random(200, epochs=10),
        lambda: Random(8, epochs=1),
    ),
    "MNIST CNN": Search(
        lambda data, quick: pictures.Convolutional(data / pictures.MNIST, *((128, 100) if quick else (5000, 1000))),
        {"lr": RATE, "width": shoal.choice([8, 16]), "batch_size": 50},
        lambda: Random(16, epochs=3),
        lambda: Random(2, epochs=1),
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
        lambda: Random(2, epochs=1),
        file=pictures.CIFAR,
        tolerance=0.03,
    ),
    "autoencoder": Search(
        lambda data, quick: pictures.Autoencoder(data / pictures.MNIST, *((128, 100) if quick else (5000, 1000))),
        {"lr": RATE, "latent": shoal.choice([8, 16, 32]), "batch_size": 50},
        lambda: Random(24, epochs=5),
        lambda: Random(2, epochs=1),
        metric="valid_loss",
        mode="min",
        file=pictures.MNIST,
    ),
    "GAN": Search(
        lambda data, quick: pictures.GAN(data / pictures.MNIST, 128 if quick else 3000),
        {"lr": shoal.loguniform(1e-4, 1e-3), "beta": shoal.uniform(0.3, 0.9), "width": 128, "batch_size": 50},
        lambda: Random(16, epochs=6),
        lambda: Random(2, epochs=1),
        metric="gap",
        mode="min",
        file=pictures.MNIST,
        tolerance=0.05,
    ),
    "6 perceptrons": Search(
        lambda data, quick: pictures.Perceptron(data / pictures.MNIST, *((128, 100) if quick else (20000, 2000))),
        {"lr": RATE, "width": 256, "batch_size": 64},
        lambda: Random(6, epochs=6),
        lambda: Random(2, epochs=1),
        file=pictures.MNIST,
    ),
    "LSTM": Search(
        lambda data, quick: text.LSTM(data / text.SHAKESPEARE, *((32, 16, 16) if quick else (1500, 200, 50))),
        {"lr": shoal.loguniform(1e-3, 1e-2), "width": shoal.choice([64, 128]), "batch_size": 25},
        lambda: Random(8, epochs=3),
        lambda: Random(2, epochs=1),
        metric="valid_loss",
        mode="min",
        file=text.SHAKESPEARE,
        tolerance=0.05,
    ),
    "GPT, halving": Search(
        lambda data, quick: text.GPT(data / text.SHAKESPEARE, *((32, 16, 16) if quick else (500, 100, 64))),
        {"lr": RATE, "width": shoal.choice([64, 96]), "batch_size": 20},
        lambda: SuccessiveHalving(n=18, max_epochs=9, eta=3),
        lambda: SuccessiveHalving(n=2, max_epochs=2, eta=2),
        metric="valid_loss",
        mode="min",
        file=text.SHAKESPEARE,
        tolerance=0.05,
    ),
    "LoRA": Search(
        lambda data, quick: text.Adapters(data / text.SHAKESPEARE, *((8, 8, 16) if quick else (256, 64, 64))),
        {"lr": RATE, "rank": shoal.choice([4, 8, 16]), "batch_size": 8},
        lambda: Random(8, epochs=3),
        lambda: Random(2, epochs=1),
        metric="valid_loss",
        mode="min",
        file=text.SHAKESPEARE,
        imports=(LLAMA, PEFT),
        tolerance=0.05,
    ),
    "BERT-Tiny": Search(
        lambda data, quick: text.Reviews(data / text.REVIEWS, *((16, 16, 8) if quick else (600, 150, 48))),
        {"lr": shoal.loguniform(1e-4, 1e-3), "weight_decay": shoal.loguniform(1e-4, 1e-1), "batch_size": 20},
        lambda: Random(8, epochs=3),
        lambda: Random(2, epochs=1),
        file=text.REVIEWS,
        imports=(BERT,),
        tolerance=0.06,
    ),
}
