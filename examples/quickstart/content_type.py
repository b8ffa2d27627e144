"""Content-type detection with magika, whose ONNX network is inside its package: nothing is downloaded."""

from __future__ import annotations

from typing import Any

import numpy as np
from magika import Magika
from numpy.typing import NDArray

from gpuserve.decorators import batch


class ContentType:
    """Says what each content is. The network is loaded once, when the instance starts."""

    def __init__(self) -> None:
        self._magika = Magika()

    @batch
    def __call__(self, content: NDArray[np.object_]) -> dict[str, NDArray[Any]]:
        """``content``: bytes, [rows, 1]. Answers ``label``: bytes, and ``score``: 0 to 1, both [rows, 1]."""
        # magika's public interface takes one content at a time.
        results = [self._magika.identify_bytes(one) for one in content[:, 0]]
        return {
            "label": np.array([[str(result.output.label).encode()] for result in results], dtype=object),
            "score": np.array([[result.score] for result in results], dtype=np.float32),
        }
