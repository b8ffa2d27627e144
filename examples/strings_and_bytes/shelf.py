"""Packs bytes and describes text: BYTES tensors hold any bytes at all, of any length."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuserve.decorators import batch


@batch
def pack(content: NDArray[np.object_]) -> dict[str, NDArray[Any]]:
    """``content``: bytes [rows, n]. Answers ``packed``, compressed, and ``crc``: uint32, both [rows, n].

    Arrays of ``object`` keep every byte; numpy's own bytes dtype would lose zeros at the end.
    """
    contents: list[bytes] = content.ravel().tolist()
    packed = np.array([zlib.compress(one) for one in contents], dtype=object)
    crc = np.array([zlib.crc32(one) for one in contents], dtype=np.uint32)
    return {"packed": packed.reshape(content.shape), "crc": crc.reshape(content.shape)}


@batch
def describe(text: NDArray[np.object_]) -> dict[str, NDArray[Any]]:
    """``text``: UTF-8 [rows, 1]. Answers ``summary``: str, which is sent as UTF-8 [rows, 1].

    What is not UTF-8 is replaced: an error would be one for all rows of the batch.
    """
    words = [one.decode(errors="replace").split() for one in text[:, 0]]
    return {"summary": np.array([[f"{len(one)} words, first {one[0] if one else '-'}"] for one in words])}
