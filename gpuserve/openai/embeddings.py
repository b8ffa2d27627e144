"""Embeddings: what a callable is asked for a batch of requests, and its arrays as OpenAI's answers. Pure."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuserve.openai.answers import BadRequest, Embeddings
from gpuserve.openai.documents import dumps
from gpuserve.openai.requests import EmbeddingRequest

Vectors = NDArray[np.float32]


def cut_apart(vectors: Any, asked: Sequence[EmbeddingRequest]) -> list[Vectors]:
    """The vectors of each request, of those of all their inputs. Raises ValueError: they are too many, or too
    few.
    """
    rows = _rows(vectors)
    counts = [len(one.inputs) for one in asked]
    if len(rows) != sum(counts):
        raise ValueError(f"expected {sum(counts)} vectors, one for each input, got {len(rows)}")
    ends = np.cumsum(counts)
    return [rows[end - count : end] for count, end in zip(counts, ends, strict=True)]


def answer(asked: EmbeddingRequest, given: Any) -> bytes:
    """The answer to one request. Raises BadRequest: the vectors are shorter than the client wants them;
    ValueError, TypeError: they are none.
    """
    made = given if isinstance(given, Embeddings) else Embeddings(given)
    rows = cut_apart(made.vectors, [asked])[0]
    if asked.dimensions is not None:
        rows = _shortened(rows, asked.dimensions)
    usage = {"prompt_tokens": made.prompt_tokens, "total_tokens": made.prompt_tokens}
    data = [
        {"object": "embedding", "index": index, "embedding": _written(row, asked.encoding_format)}
        for index, row in enumerate(rows)
    ]
    return dumps({"object": "list", "data": data, "model": asked.model, "usage": usage})


def _rows(vectors: Any) -> Vectors:
    """Float32 [rows, dimensions], of whatever library."""
    if hasattr(vectors, "detach"):  # a tensor of torch
        vectors = vectors.detach().float().cpu().numpy()
    rows: Vectors = np.ascontiguousarray(vectors, dtype="<f4")
    if rows.ndim != 2:
        raise ValueError(f"expected vectors of shape [inputs, dimensions], got {list(rows.shape)}")
    return rows


def _shortened(rows: Vectors, dimensions: int) -> Vectors:
    """The first dimensions, of length 1 again."""
    width = rows.shape[1]
    if dimensions > width:
        raise BadRequest(f"this model's vectors have {width}, given {dimensions}", "dimensions")
    if dimensions == width:
        return rows
    cut = rows[:, :dimensions]
    norms = np.linalg.norm(cut, axis=1, keepdims=True)
    return np.ascontiguousarray(cut / np.where(norms, norms, 1), dtype="<f4")


def _written(row: Vectors, encoding_format: str | None) -> Any:
    return base64.b64encode(row.tobytes()).decode() if encoding_format == "base64" else row
