"""Models that ask each other, and a model whose others are made up by the test."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gpuserve.testing import TestClient


@pytest.mark.gpuserve("config.yaml")
def test_each_text_in_its_own_language(gpuserve_client: TestClient) -> None:
    texts = [["a good day"], ["das ist mies"]]
    assert gpuserve_client.infer("mood", text=texts)["mood"].tolist() == [[1], [-1]]
    both = gpuserve_client.infer("moods", text=texts)
    assert (both["mood_en"].tolist(), both["mood_de"].tolist()) == ([[1], [0]], [[0], [-1]])


def _no_mood(inputs: dict[str, Any]) -> dict[str, Any]:
    return {"mood": np.zeros(inputs["text"].shape, np.int32)}


@pytest.mark.gpuserve(
    "asking.py:moods",
    others={"mood_en": _no_mood, "mood_de": _no_mood},
    inputs=[{"name": "text", "dtype": "bytes", "shape": [1]}],
    outputs=[{"name": name, "dtype": "int32", "shape": [1]} for name in ("mood_en", "mood_de")],
    max_batch_size=4,
)
def test_nobody_has_a_mood(gpuserve_client: TestClient) -> None:
    assert gpuserve_client.infer(text=[["good"]])["mood_en"].tolist() == [[0]]
