"""A language model of two LSTM layers (Zaremba et al., arXiv:1409.2329, without dropout)."""

from torch import Tensor, nn

__all__ = ["LanguageModel"]


class LanguageModel(nn.Module):
    """Predicts each next token from those before it."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.recurrent = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.decoder = nn.Linear(width, words)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(self.recurrent(self.embedding(tokens))[0])
