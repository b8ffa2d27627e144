"""An ONNX file on a GPU: inputs are read where they lie, and outputs stay there. Only on a real GPU, with
onnxruntime-gpu: the stand-in has no provider of onnxruntime.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gpu_machine import real_gpu
from serving import GPUSERVE, JSON_LOG, serving
from tritonclient.grpc import InferenceServerClient, InferInput

pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

from onnx_models import identity, mlp  # noqa: E402 - it needs what is asked for above

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(
        not real_gpu() or "CUDAExecutionProvider" not in onnxruntime.get_available_providers(),
        reason="needs a GPU and onnxruntime-gpu",
    ),
]


@pytest.mark.parametrize("array", ["numpy", "cupy", "torch"])
def test_a_network_answers_as_on_the_cpu(tmp_path: Path, array: str) -> None:
    if array != "numpy":
        pytest.importorskip(array)
    (tmp_path / "net.onnx").write_bytes(mlp(8, 16, 4))
    (tmp_path / "same.onnx").write_bytes(identity("FP16"))
    entries = [
        f"{{name: {name}, callable: {name}.onnx, array: {array}, instances: [{{device: 'cuda:0'}}]}}"
        for name in ("net", "same")
    ]
    (tmp_path / "config.yaml").write_text("models:\n" + "".join(f"  - {one}\n" for one in entries))
    rows = np.random.default_rng(2).standard_normal((5, 8), np.float32)
    expected = onnxruntime.InferenceSession(
        str(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"]
    ).run(["y"], {"x": rows})[0]
    halves = np.arange(6, dtype=np.float16).reshape(2, 3)
    with (
        serving(GPUSERVE, "serve", str(tmp_path / "config.yaml"), *JSON_LOG) as server,
        InferenceServerClient(server.grpc) as client,
    ):
        tensor = InferInput("x", list(rows.shape), "FP32")
        tensor.set_data_from_numpy(rows)
        np.testing.assert_allclose(
            client.infer("net", [tensor]).as_numpy("y"), expected, rtol=1e-2, atol=1e-3
        )
        tensor = InferInput("x", list(halves.shape), "FP16")
        tensor.set_data_from_numpy(halves)
        np.testing.assert_array_equal(client.infer("same", [tensor]).as_numpy("y"), halves)
