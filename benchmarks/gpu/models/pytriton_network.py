"""A network under PyTriton: ``pytriton_network.py HTTP_PORT GRPC_PORT METRICS_PORT KIND SIZE DEVICE``."""

from __future__ import annotations

import sys

import numpy as np
import torch
from numpy.typing import NDArray
from pytriton.decorators import batch
from pytriton.model_config import ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig

from benchmarks.gpu.models.networks import Network, example


def main(http_port: str, grpc_port: str, metrics_port: str, kind: str, size: str, device: str) -> None:
    network = Network(kind, size, device)

    @batch
    def infer(x: NDArray[np.int32]) -> dict[str, NDArray[np.float32]]:
        return {"y": network.forward(torch.from_numpy(x).to(device)).cpu().numpy()}

    x = example(kind, 1)
    features = network.forward(torch.from_numpy(x).to(device)).shape[1]
    config = TritonConfig(
        http_address="127.0.0.1",
        http_port=int(http_port),
        grpc_port=int(grpc_port),
        metrics_port=int(metrics_port),
    )
    with Triton(config=config) as triton:
        triton.bind(
            model_name=kind,
            infer_func=infer,
            inputs=[Tensor(name="x", dtype=x.dtype.type, shape=x.shape[1:])],
            outputs=[Tensor(name="y", dtype=np.float32, shape=(features,))],
            config=ModelConfig(max_batch_size=256, batcher=None),  # as the others: no two share a batch
        )
        triton.serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
