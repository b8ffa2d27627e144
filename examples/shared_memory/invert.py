"""Inverts images. Where they lie is not known here."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gpuserve import Request


def invert(requests: Sequence[Request]) -> list[dict[str, NDArray[np.uint8]]]:
    """``image``: uint8 [height, width, 3]. Answers ``image``, of the same shape."""
    return [{"image": 255 - request["image"]} for request in requests]
