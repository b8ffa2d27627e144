"""The ensemble finds the right name, and its steps can be asked by themselves."""

from __future__ import annotations

import numpy as np
import pytest
from steps import SIZE, bar, disc, ring

from gpuserve.testing import TestClient

pytestmark = pytest.mark.gpuserve("config.yaml")


@pytest.mark.parametrize(
    ("shape", "name"), [(bar, b"a bar"), (ring, b"a ring"), (disc, b"a disc")], ids=["bar", "ring", "disc"]
)
def test_a_shape_is_named(gpuserve_client: TestClient, shape: object, name: bytes) -> None:
    assert callable(shape)
    picture = (255 * shape(2 * SIZE)).astype(np.uint8)[np.newaxis]
    found = gpuserve_client.infer("shapes", picture=picture)
    assert found["label"].tolist() == [[name]]
    pixels = gpuserve_client.infer("preprocess", raw=picture)["pixels"]
    assert gpuserve_client.infer("classify", pixels=pixels)["scores"].tolist() == found["scores"].tolist()
