"""Contrast of grey images: the darkest pixels become black, the brightest white."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gpuserve.decorators import batch, fill_optionals, first_value, group_by_values

CUT_PERCENT = np.array([1.0], np.float32)
GAMMA = np.array([1.0], np.float32)


@fill_optionals(cut_percent=CUT_PERCENT, gamma=GAMMA)
@batch
@group_by_values("cut_percent", "gamma")
@first_value("cut_percent", "gamma")
def stretch(
    image: NDArray[np.uint8], cut_percent: np.float32, gamma: np.float32
) -> dict[str, NDArray[np.uint8]]:
    """``image``: uint8, [rows, height, width]. Answers ``image``, of the same shape.

    Args:
        image: all images of the batch that want the same two numbers.
        cut_percent: how many of the darkest and of the brightest pixels do not count; at most 50.
        gamma: above 1 darkens what lies between black and white.
    """
    # Any number is taken: an error would be one for all images of the batch, whatever they want.
    cut = max(0.0, min(50.0, float(cut_percent)))
    black, white = np.percentile(image, (cut, 100 - cut), axis=(1, 2), keepdims=True)
    level = np.clip((image - black) / np.maximum(white - black, 1), 0, 1)
    return {"image": np.rint(255 * level**gamma).astype(np.uint8)}
