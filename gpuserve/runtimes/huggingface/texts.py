"""Tasks whose requests are texts and whose answers come at once: classes of texts and of tokens, and
vectors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from gpuserve.runtimes.huggingface.folders import hidden_size_of, labels_of, sentence_pooling
from gpuserve.runtimes.huggingface.libraries import load_pipeline
from gpuserve.runtimes.huggingface.requests import (
    answer_rows,
    column,
    declared,
    scored,
    scored_outputs,
    texts_in,
)
from gpuserve.runtimes.huggingface.settings import Settings

MAX_BATCH_SIZE: Final = 64
_TEXT: Final = {"name": "text", "dtype": "bytes", "shape": [1]}
_read = texts_in("text")


class TextClassification:
    """Answers a text with its class, the score of that, and the scores of all classes."""

    def __init__(self, settings: Settings, config: Mapping[str, Any]) -> None:
        self._pipeline = load_pipeline(settings, "text-classification")
        self._labels = labels_of(config)
        self._options = {"truncation": True, **settings.options, "top_k": None}

    @classmethod
    def declare(cls, _settings: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
        return declared([_TEXT], scored_outputs(labels_of(config)), MAX_BATCH_SIZE)

    def __call__(self, requests: Sequence[Any]) -> list[Any]:
        return answer_rows(requests, _read, self._run)

    def _run(self, texts: list[str]) -> dict[str, NDArray[Any]]:
        return scored(self._pipeline(texts, batch_size=len(texts), **self._options), self._labels)


class TokenClassification:
    """Answers a text with the entities in it: JSON, as the pipeline of transformers gives them."""

    def __init__(self, settings: Settings, _config: Mapping[str, Any]) -> None:
        self._pipeline = load_pipeline(settings, "token-classification")
        self._options = {"aggregation_strategy": "simple", **settings.options}

    @classmethod
    def declare(cls, _settings: Settings, _config: Mapping[str, Any]) -> dict[str, Any]:
        return declared([_TEXT], [{"name": "entities", "dtype": "bytes", "shape": [1]}], MAX_BATCH_SIZE)

    def __call__(self, requests: Sequence[Any]) -> list[Any]:
        return answer_rows(requests, _read, self._run)

    def _run(self, texts: list[str]) -> dict[str, NDArray[Any]]:
        found = self._pipeline(texts, batch_size=len(texts), **self._options)
        return {"entities": column([json.dumps(one, default=_plain, ensure_ascii=False) for one in found])}


class FeatureExtraction:
    """Answers a text with a vector: of its tokens' vectors the mean, or the first; or with all of them."""

    def __init__(self, settings: Settings, config: Mapping[str, Any]) -> None:
        self._pipeline = load_pipeline(settings, "feature-extraction")
        self._pooling, self._normalize = _pooling(settings)
        self._options = {"padding": True, "truncation": True, **settings.options}

    @classmethod
    def declare(cls, settings: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
        size = hidden_size_of(config)
        if _pooling(settings)[0] == "none":
            output = {"name": "features", "dtype": "float32", "shape": [-1, size]}
        else:
            output = {"name": "embedding", "dtype": "float32", "shape": [size]}
        return declared([_TEXT], [output], MAX_BATCH_SIZE)

    def __call__(self, requests: Sequence[Any]) -> list[Any]:
        return answer_rows(requests, _read, self._run)

    def embed(self, requests: list[Any]) -> list[Any]:
        """The vectors of the EmbeddingRequests of OpenAI's clients, and how many tokens their texts have; an
        error for one that brings no texts.
        """
        from gpuserve.openai import BadRequest, Embeddings

        answers: list[Any] = []
        texts: list[str] = []
        for one in requests:
            try:
                answers.append(slice(len(texts), len(texts) + len(one.texts)))
                texts += one.texts
            except BadRequest as error:
                answers.append(error)
        vectors, counts = self._vectors(texts) if texts else (np.empty((0, 0)), np.empty(0))
        return [
            Embeddings(vectors[one], int(counts[one].sum())) if isinstance(one, slice) else one
            for one in answers
        ]

    def _run(self, texts: list[str]) -> dict[str, NDArray[Any]]:
        name = "features" if self._pooling == "none" else "embedding"
        return {name: self._vectors(texts)[0]}

    def _vectors(self, texts: list[str]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """One vector a text, or one a token, padded with zeros; and how many tokens each text has."""
        import torch

        pipeline = self._pipeline
        with torch.inference_mode():
            given = pipeline.tokenizer(texts, return_tensors="pt", **self._options).to(pipeline.model.device)
            hidden = pipeline.model(**given).last_hidden_state.float()
            mask = given["attention_mask"].unsqueeze(-1)
            vectors = self._pooled(hidden, mask)
            if self._normalize:
                vectors = torch.nn.functional.normalize(vectors, dim=-1)
            return vectors.cpu().numpy(), given["attention_mask"].sum(dim=1).cpu().numpy()

    def _pooled(self, hidden: Any, mask: Any) -> Any:
        if self._pooling == "cls":
            return hidden[:, 0]
        if self._pooling == "mean":
            return (hidden * mask).sum(dim=1) / mask.sum(dim=1).clamp(min=1)
        return hidden * mask


def _pooling(settings: Settings) -> tuple[str, bool]:
    """How one vector is made, and whether it has length 1: as said, or as the folder of
    sentence-transformers does.
    """
    known = sentence_pooling(settings.file) or ("mean", False)
    pooling = settings.pooling or known[0]
    return pooling, known[1] if settings.normalize is None else settings.normalize


def _plain(value: Any) -> Any:
    """Numbers of numpy as JSON has them."""
    return value.item()
