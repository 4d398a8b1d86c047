"""Vision transformers for small images: ViT (Dosovitskiy et al., arXiv:2010.11929) and DeiT.

DeiT (Touvron et al., arXiv:2012.12877) has a second token and head, which learn from a teacher; without one both learn
from the labels. Its prediction is the mean of both heads'.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["VisionTransformer"]

CLASSES = 10


class Layer(nn.Module):
    """Attention and a perceptron, each after a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.perceptron = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.perceptron(self.norm2(x))

    def attend(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(2, (self.heads, -1)).transpose(1, 2) for part in self.query_key_value(x).chunk(3, dim=2)
        )
        return self.out(F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2))


class VisionTransformer(nn.Module):
    """Predicts a class from the first tokens of a sequence, to which the patches of the image are the rest.

    Args:
        width: of a token.
        depth: layers.
        heads: of each layer.
        patches: on a side of the image.
        patch: pixels on a side of one.
        predicting: tokens that do: 1 is ViT, 2 is DeiT.
    """

    def __init__(self, width: int, depth: int, heads: int, patches: int, patch: int, predicting: int) -> None:
        super().__init__()
        self.embedding = nn.Conv2d(3, width, patch, patch)
        self.tokens = nn.Parameter(torch.empty(1, predicting, width))
        self.positions = nn.Parameter(torch.empty(1, predicting + patches**2, width))
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.classes = nn.ModuleList(nn.Linear(width, CLASSES) for _ in range(predicting))
        for parameter in (self.tokens, self.positions):
            nn.init.trunc_normal_(parameter, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.embedding(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.tokens.expand(len(patches), -1, -1), patches], dim=1) + self.positions
        out = self.norm(self.layers(tokens))
        scores = [head(out[:, place]) for place, head in enumerate(self.classes)]
        return torch.stack(scores).mean(0)
