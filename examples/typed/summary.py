"""What is in a grey image: how bright it is, and where the brightest pixel lies."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import numpy as np

from gpuserve.typed import Bool, Float32, Int32, Parameter, Shape, UInt8, batch

Image = Annotated[UInt8, Shape(-1, -1)]
Mask = Annotated[Bool, Shape(-1, -1)]


class Summary(NamedTuple):
    mean: Annotated[Float32, Shape()]
    brightest: Annotated[Int32, Shape(2)]


@batch(max_batch_size=32)
def summarize(image: Image, mask: Mask | None = None, scale: Parameter[float] = 1.0) -> Summary:
    """``mask`` leaves pixels out; ``scale`` is what white counts."""
    counted = np.ones_like(image, dtype=bool) if mask is None else mask
    pixels = np.where(counted, image / 255 * scale, 0).reshape(len(image), -1)
    mean = pixels.sum(axis=1) / np.maximum(counted.reshape(len(image), -1).sum(axis=1), 1)
    places = np.unravel_index(pixels.argmax(axis=1), image.shape[1:])
    return Summary(mean.astype(np.float32), np.stack(places, axis=1).astype(np.int32))
