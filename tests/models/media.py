"""Functions that see images and sound."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from pydantic import BaseModel

from gpuserve.typed import Audio, Float32, Image, batch, sample


class Seen(NamedTuple):
    small: list[Image]
    mean: Float32


@batch(max_batch_size=4)
def thumbnails(photo: list[Image]) -> list[Image]:
    return [one.convert("L").resize((2, 1)) for one in photo]


@batch(max_batch_size=4)
def means(photo: list[Image], scale: Float32 | None = None) -> Seen:
    factor = 1 if scale is None else scale
    return Seen(photo, np.float32([[np.asarray(one).mean()] for one in photo]) * factor)


@sample
def louder(sound: Audio) -> Audio:
    return Audio(sound.samples * 2, sound.sample_rate)


class Order(BaseModel):
    item: str
    counts: list[int]


class Bill(BaseModel):
    item: str
    total: int


@batch(max_batch_size=4)
def bills(order: list[Order]) -> list[Bill]:
    return [Bill(item=one.item, total=sum(one.counts)) for one in order]
