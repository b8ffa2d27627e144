"""A program written for PyTriton: it serves a model, and knows nothing of gpuserve. ``add_up.py``"""

from __future__ import annotations

import argparse

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


@batch
def add_up(amounts: np.ndarray, rate: np.ndarray) -> dict[str, np.ndarray]:
    """``amounts``: float64 [rows, n]; ``rate``: float64 [rows, 1]. Answers ``total`` with tax, [rows, 1]."""
    net = amounts.sum(axis=1, keepdims=True)
    return {"total": np.round(net * (1 + rate), 2)}


def main() -> None:
    """Serves until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--metrics-port", type=int, default=8002)
    ports = parser.parse_args()
    with Triton(config=TritonConfig(**vars(ports))) as triton:
        triton.bind(
            model_name="add_up",
            infer_func=add_up,
            inputs=[
                Tensor(name="amounts", dtype=np.float64, shape=(-1,)),
                Tensor(name="rate", dtype=np.float64, shape=(1,)),
            ],
            outputs=[Tensor(name="total", dtype=np.float64, shape=(1,))],
            config=ModelConfig(max_batch_size=32, batcher=DynamicBatcher(max_queue_delay_microseconds=100)),
        )
        triton.serve()


if __name__ == "__main__":
    main()
