"""Every answer is right, in this process and by the two instances of ``config.yaml``."""

from __future__ import annotations

import numpy as np
import pytest
from linear import INPUT_FEATURES, parameters

from gpuserve.testing import ModelCallError, TestClient

pytestmark = pytest.mark.gpuserve("config.yaml")


def test_the_layer(gpuserve_client: TestClient) -> None:
    weight, bias = parameters(30)
    x = np.ones((2, INPUT_FEATURES), np.float32)
    np.testing.assert_allclose(gpuserve_client.infer("linear", x=x)["y"], x @ weight + bias, rtol=1e-5)


def test_the_layer_behind_its_server(gpuserve_client: TestClient, gpuserve_server: TestClient) -> None:
    rows = [{"x": np.full((1, INPUT_FEATURES), number, np.float32)} for number in range(8)]
    here = gpuserve_client.infer_batch("linear", rows)
    there = gpuserve_server.infer_batch("linear", rows)
    for one, other in zip(here, there, strict=True):
        np.testing.assert_allclose(one["y"], other["y"], rtol=1e-5)


def test_a_row_too_short(gpuserve_client: TestClient) -> None:
    with pytest.raises(ModelCallError, match=r"unexpected shape for input 'x'"):
        gpuserve_client.infer("linear", x=[[1.0, 2.0]])
