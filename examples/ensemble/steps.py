"""Three models that name the shape in a picture: one prepares it, one looks at it, one finds words."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuserve.decorators import batch

SIZE = 32
_LABELS = ("a bar", "a ring", "a disc")


@batch
def preprocess(raw: NDArray[np.uint8]) -> dict[str, NDArray[np.float32]]:
    """``raw``: grey pictures, uint8 [rows, height, width]. Answers ``pixels``: float32 [rows, 32, 32]."""
    rows, height, width = raw.shape
    tiles = raw.reshape(rows, SIZE, height // SIZE, SIZE, width // SIZE)
    return {"pixels": tiles.mean(axis=(2, 4), dtype=np.float32) / 255}


@batch
def classify(pixels: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """``pixels``: float32 [rows, 32, 32]. Answers ``scores``: float32 [rows, 3], of bar, ring and disc."""
    templates = np.stack([bar(SIZE), ring(SIZE), disc(SIZE)]).reshape(3, -1)
    templates = templates - templates.mean(axis=1, keepdims=True)
    templates /= np.linalg.norm(templates, axis=1, keepdims=True)
    flat = pixels.reshape(len(pixels), -1)
    flat -= flat.mean(axis=1, keepdims=True)  # inputs may be written to
    flat /= np.linalg.norm(flat, axis=1, keepdims=True) + 1e-6
    return {"scores": (flat @ templates.T).astype(np.float32)}


@batch
def postprocess(scores: NDArray[np.float32]) -> dict[str, Any]:
    """``scores``: float32 [rows, 3]. Answers ``label``: bytes [rows, 1], and ``score``: float32 [rows, 1]."""
    best = scores.argmax(axis=1)
    labels = np.array([[_LABELS[number].encode()] for number in best], dtype=object)
    return {"label": labels, "score": scores[np.arange(len(best)), best][:, None]}


def bar(size: int) -> NDArray[np.float64]:
    """An upright bar in the middle, 0 to 1."""
    column = np.abs(np.arange(size) - size / 2) < size / 8
    return np.tile(column.astype(float), (size, 1))


def disc(size: int) -> NDArray[np.float64]:
    """A disc that fills most of the picture, 0 to 1."""
    return (_radius(size) < size * 0.4).astype(float)


def ring(size: int) -> NDArray[np.float64]:
    """A ring of the same size, 0 to 1."""
    radius = _radius(size)
    return ((radius < size * 0.4) & (radius > size * 0.25)).astype(float)


def _radius(size: int) -> NDArray[np.float64]:
    y, x = np.mgrid[:size, :size] - (size - 1) / 2
    radius: NDArray[np.float64] = np.hypot(y, x)
    return radius
