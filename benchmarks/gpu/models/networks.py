"""Networks in torch with random weights, as callables of a server and for a bare loop: the same code in both.

Weights are FP32 and stay at torch's defaults; what is compared is who calls them.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from gpuserve.decorators import batch

#: Features of the MLP's input and output, tokens and features of the encoders.
MLP_FEATURES: Final = 1024
TOKENS: Final = 128
ENCODER_FEATURES: Final = 512
SENTENCE_TOKENS: Final = 64
SENTENCE_FEATURES: Final = 384
_VOCABULARY: Final = 30_522


class Encoder(nn.Module):
    """A BERT-like encoder: tokens INT32 [rows, tokens], 0 is padding, to the mean over a row's tokens."""

    def __init__(self, features: int, layers: int, heads: int, inner: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, features)
        self.positions = nn.Embedding(512, features)
        layer = nn.TransformerEncoderLayer(
            features, heads, inner, dropout=0.0, activation="gelu", batch_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        known = (tokens != 0).unsqueeze(-1)
        places = torch.arange(tokens.shape[1], device=tokens.device)
        features = self.layers(self.tokens(tokens) + self.positions(places))
        return (features * known).sum(1) / known.sum(1).clamp(min=1)


def mlp(width: int, layers: int) -> nn.Module:
    """Linear layers of this width with ReLU between them, float32 [rows, 1024] to [rows, 1024]."""
    inner = [part for _ in range(layers - 2) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(nn.Linear(MLP_FEATURES, width), nn.ReLU(), *inner, nn.Linear(width, MLP_FEATURES))


def network(kind: str, size: str) -> nn.Module:
    """By name: "mlp", "encoder" or "minilm" (as all-MiniLM-L6); ``size`` "small" is for trying out."""
    torch.manual_seed(0)
    if kind == "mlp":
        return mlp(64, 3) if size == "small" else mlp(8192, 8)
    if kind == "minilm":
        return Encoder(SENTENCE_FEATURES, 1 if size == "small" else 6, 12, 1536)
    return Encoder(ENCODER_FEATURES, 1 if size == "small" else 6, 8, 2048)


def example(kind: str, rows: int) -> NDArray[Any]:
    random = np.random.default_rng(rows)
    if kind == "mlp":
        return random.standard_normal((rows, MLP_FEATURES), np.float32)
    tokens = SENTENCE_TOKENS if kind == "minilm" else TOKENS
    return random.integers(1, _VOCABULARY, (rows, tokens), np.int32)


class Network:
    """A network on its device. ``device`` is "cpu" or "cuda:0"."""

    def __init__(self, kind: str, size: str, device: str) -> None:
        # One thread: several of these share a machine where there is no GPU.
        torch.set_num_threads(1)
        with torch.device(device):  # random numbers for gigabytes of weights are quicker made there
            self._network = network(kind, size).eval()

    @torch.inference_mode()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        answer: torch.Tensor = self._network(x)
        return answer

    @batch
    def __call__(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.forward(x)}
