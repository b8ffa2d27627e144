"""Classes of images, which come encoded (PNG, JPEG and what else Pillow reads) or as arrays of bytes."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

from numpy.typing import NDArray

from gpuserve.runtimes.huggingface.folders import labels_of
from gpuserve.runtimes.huggingface.libraries import EXTRA, load_pipeline
from gpuserve.runtimes.huggingface.requests import answer_rows, declared, scored, scored_outputs
from gpuserve.runtimes.huggingface.settings import Settings
from gpuserve.runtimes.missing import library

MAX_BATCH_SIZE: Final = 32


class ImageClassification:
    """Answers an image with its class, the score of that, and the scores of all classes."""

    def __init__(self, settings: Settings, config: Mapping[str, Any]) -> None:
        self._pillow = library("PIL.Image", EXTRA)
        self._pipeline = load_pipeline(settings, "image-classification")
        self._labels = labels_of(config)
        self._read = self._pixels if settings.image == "array" else self._decoded
        self._options = {**settings.options, "top_k": len(self._labels)}

    @classmethod
    def declare(cls, settings: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
        if settings.image == "array":
            image = {"name": "image", "dtype": "uint8", "shape": [-1, -1, 3]}
        else:
            image = {"name": "image", "dtype": "bytes", "shape": [1]}
        return declared([image], scored_outputs(labels_of(config)), MAX_BATCH_SIZE)

    def __call__(self, requests: Sequence[Any]) -> list[Any]:
        return answer_rows(requests, self._read, self._run)

    def _run(self, images: list[Any]) -> dict[str, NDArray[Any]]:
        return scored(self._pipeline(images, batch_size=len(images), **self._options), self._labels)

    def _decoded(self, request: Mapping[str, NDArray[Any]]) -> list[Any]:
        return [self._image(one) for one in request["image"].ravel()]

    def _image(self, encoded: bytes) -> Any:
        try:
            return self._pillow.open(io.BytesIO(encoded)).convert("RGB")
        except (OSError, SyntaxError, self._pillow.DecompressionBombError) as error:
            told = "cannot be decoded" if isinstance(error, (OSError, SyntaxError)) else "has too many pixels"
            raise ValueError(
                "Input 'image' must be an encoded image such as PNG or JPEG, but one of "
                f"{len(encoded)} bytes {told}"
            ) from None

    def _pixels(self, request: Mapping[str, NDArray[Any]]) -> list[Any]:
        return [self._pillow.fromarray(one) for one in request["image"]]
