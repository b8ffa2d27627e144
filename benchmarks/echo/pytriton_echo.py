"""The echo model as PyTriton runs it: started by ``servers.PyTriton`` with three ports as arguments."""

from __future__ import annotations

import sys

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


@batch
def echo(x: np.ndarray) -> dict[str, np.ndarray]:
    """x: [rows, n] FP32, returned as y."""
    return {"y": x}


def main(http_port: int, grpc_port: int, metrics_port: int) -> None:
    """Serve the model until SIGTERM."""
    config = TritonConfig(
        http_address="127.0.0.1",
        http_port=http_port,
        grpc_address="127.0.0.1",
        grpc_port=grpc_port,
        metrics_port=metrics_port,
    )
    with Triton(config=config) as triton:
        triton.bind(
            model_name="echo",
            infer_func=echo,
            inputs=[Tensor(name="x", dtype=np.float32, shape=(-1,))],
            outputs=[Tensor(name="y", dtype=np.float32, shape=(-1,))],
            config=ModelConfig(max_batch_size=64, batcher=DynamicBatcher()),
        )
        triton.serve()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
