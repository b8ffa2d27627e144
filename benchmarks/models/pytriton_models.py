"""The models of the benchmarks as PyTriton runs them.

Started by ``servers.PyTriton`` with three ports and the names of the models as arguments.
"""

from __future__ import annotations

import sys

import numpy as np
from model import echo, echo_one, eight_inputs, tokens
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


def tensors(
    *names: str, dtype: type[np.generic] = np.float32, shape: tuple[int, ...] = (-1,)
) -> list[Tensor]:
    return [Tensor(name=name, dtype=dtype, shape=shape) for name in names]


_X, _Y, _BATCHED = tensors("x"), tensors("y"), {"max_batch_size": 64, "batcher": DynamicBatcher()}
_BYTES = tensors("x", dtype=np.bytes_), tensors("y", dtype=np.bytes_)
_TOKENS = tensors("count", dtype=np.int32, shape=(1,)), tensors("token", dtype=np.int32, shape=(1,))
#: By name: the callable, inputs, outputs and configuration. Inputs that are only read are not known here.
MODELS = {
    "echo": (echo, _X, _Y, ModelConfig(**_BATCHED)),
    "echo-read-only": (echo, _X, _Y, ModelConfig(**_BATCHED)),
    "echo-bytes": (echo, *_BYTES, ModelConfig(**_BATCHED)),
    "echo-unbatched": (echo_one, _X, _Y, ModelConfig(batching=False)),
    "eight-inputs": (eight_inputs, tensors(*"abcdefgh"), _Y, ModelConfig(**_BATCHED)),
    "tokens": (tokens, *_TOKENS, ModelConfig(**_BATCHED, decoupled=True)),
}


def main(http_port: int, grpc_port: int, metrics_port: int, models: list[str]) -> None:
    config = TritonConfig(
        http_address="127.0.0.1",
        http_port=http_port,
        grpc_address="127.0.0.1",
        grpc_port=grpc_port,
        metrics_port=metrics_port,
    )
    with Triton(config=config) as triton:
        for name in models:
            function, inputs, outputs, settings = MODELS[name]
            triton.bind(model_name=name, infer_func=function, inputs=inputs, outputs=outputs, config=settings)
        triton.serve()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4:])
