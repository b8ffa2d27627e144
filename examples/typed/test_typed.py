"""How bright an image is, with and without a mask."""

from __future__ import annotations

import numpy as np
import pytest

from gpuserve.testing import TestClient

pytestmark = pytest.mark.gpuserve("summary.py:summarize")


def test_the_brightest_pixel(gpuserve_client: TestClient) -> None:
    image = np.array([[[0, 51], [255, 0]]], np.uint8)
    found = gpuserve_client.infer("summarize", image=image)
    assert found["mean"].tolist() == pytest.approx([0.3])
    assert found["brightest"].tolist() == [[1, 0]]


def test_what_is_masked_does_not_count(gpuserve_client: TestClient) -> None:
    image = np.array([[[0, 51], [255, 0]]], np.uint8)
    mask = np.array([[[True, True], [False, False]]])
    found = gpuserve_client.infer(image=image, mask=mask, parameters={"scale": 10.0})
    assert found["mean"].tolist() == pytest.approx([1.0])
    assert found["brightest"].tolist() == [[0, 1]]
