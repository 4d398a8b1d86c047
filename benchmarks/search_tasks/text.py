"""Text: an LSTM, a GPT and low-rank adapters on the letters of Shakespeare, and BERT-Tiny on reviews of films."""

import lzma
import re
from collections import Counter
from pathlib import Path

import torch
import torch.nn.functional as F
from models.bert import classifier
from models.lstm import LanguageModel
from models.peft_llama import adapted
from models.vit import Layer
from torch import nn
from torch.utils.data import TensorDataset

import shoal
from search_tasks.search import Supervised

__all__ = ["GPT", "LSTM", "REVIEWS", "SHAKESPEARE", "Adapters", "Reviews"]

SHAKESPEARE, REVIEWS = "tinyshakespeare.txt", "imdb_train_5000.tsv.xz"


class Letters(shoal.Task):
    """Predicts each next letter of Shakespeare.

    Args:
        file: The text.
        train: Number of sequences to train on.
        valid: Number of sequences to validate on.
        length: Letters of a sequence.
    """

    def __init__(self, file: Path, train: int, valid: int, length: int) -> None:
        self.file, self.train, self.valid, self.length = file, train, valid, length

    def data(self, config):
        text = self.file.read_text(encoding="utf-8")
        letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
        rows = self.train + self.valid
        tokens = torch.tensor([letters[letter] for letter in text[: rows * self.length + 1]])
        x, y = tokens[:-1].view(rows, self.length), tokens[1:].view(rows, self.length)
        return TensorDataset(x[: self.train], y[: self.train]), TensorDataset(x[self.train :], y[self.train :])

    def optimizer(self, model, config):
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        return torch.optim.AdamW(trained, lr=config["lr"], weight_decay=config.get("weight_decay", 0.01))

    def loss(self, model, batch):
        tokens, following = batch
        return F.cross_entropy(model(tokens).flatten(0, 1), following.flatten())


class LSTM(Letters):
    """Two recurrent layers."""

    def model(self, config):
        return LanguageModel(LETTERS, config["width"])

    def clip_norm(self, config):
        return 1.0


class Causal(Layer):
    """A layer of a transformer in which a token attends to those before it."""

    def attend(self, x):
        parts = self.query_key_value(x).chunk(3, dim=2)
        query, key, value = (part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class SmallGPT(nn.Module):
    """Letters and places, layers, a norm, and scores of the next letter."""

    def __init__(self, width: int, depth: int, length: int) -> None:
        super().__init__()
        self.letters = nn.Embedding(LETTERS, width)
        self.places = nn.Parameter(torch.zeros(length, width))
        self.layers = nn.Sequential(*(Causal(width, heads=4) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, LETTERS)

    def forward(self, tokens):
        return self.scores(self.norm(self.layers(self.letters(tokens) + self.places)))


class GPT(Letters):
    """A transformer of two layers."""

    def model(self, config):
        return SmallGPT(config["width"], 2, self.length)


class Adapters(Letters):
    """Low-rank adapters of several ranks on one frozen Llama of 4 layers."""

    def model(self, config):
        return adapted(config["rank"])

    def loss(self, model, batch):
        tokens, following = batch
        logits = model(input_ids=tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())


class Reviews(Supervised):
    """Whether a review of a film praises it, by BERT-Tiny.

    Args:
        file: The reviews.
        train: Number of reviews to train on.
        valid: Number of reviews to validate on.
        length: Words of a review.
    """

    def __init__(self, file: Path, train: int, valid: int, length: int) -> None:
        self.file, self.train, self.valid, self.length = file, train, valid, length

    def data(self, config):
        with lzma.open(self.file, "rt", encoding="utf-8", newline="\n") as lines:
            rows = [line.rstrip("\n").split("\t", 3) for line in lines]
        order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
        rows = [rows[place] for place in order[: self.train + self.valid]]
        words = [re.findall(r"[a-z']+", text.lower())[: self.length] for *_, text in rows]
        known = Counter(word for review in words[: self.train] for word in review).most_common(WORDS - 2)
        numbers = {word: number for number, (word, _) in enumerate(known, start=2)}
        tokens = torch.zeros(len(rows), self.length, dtype=torch.long)
        for row, review in enumerate(words):
            tokens[row, : len(review)] = torch.tensor([numbers.get(word, 1) for word in review])
        labels = torch.tensor([int(label) for label, *_ in rows])
        return TensorDataset(tokens[: self.train], labels[: self.train]), TensorDataset(
            tokens[self.train :], labels[self.train :]
        )

    def model(self, config):
        return classifier(WORDS)

    def loss(self, model, batch):
        tokens, labels = batch
        return F.cross_entropy(self.scores(model, tokens), labels)

    def metrics(self, model, batch):
        tokens, labels = batch
        return {"accuracy": (self.scores(model, tokens).argmax(1) == labels).float().mean()}

    def scores(self, model, tokens):
        return model(input_ids=tokens, attention_mask=(tokens > 0).long()).logits


LETTERS, WORDS = 65, 4000
"""Number of different letters in the text, and of words that BERT-Tiny knows."""
