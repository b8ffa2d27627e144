"""The models of the benchmarks as PyTriton runs them.

Started by ``servers.PyTriton`` with three ports and the names of the models as arguments.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import numpy as np
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.proxy.types import Request
from pytriton.triton import Triton, TritonConfig


@batch
def echo(x: np.ndarray) -> dict[str, np.ndarray]:
    """x: [rows, n] FP32 or BYTES, returned as y."""
    return {"y": x}


def echo_one(requests: list[Request]) -> list[dict[str, np.ndarray]]:
    """x: [n] FP32 of each request, returned as y."""
    return [{"y": one["x"]} for one in requests]


@batch
def eight_inputs(**inputs: np.ndarray) -> dict[str, np.ndarray]:
    """a to h: [rows, n] FP32; a is returned as y."""
    return {"y": inputs["a"]}


@batch
def tokens(count: np.ndarray) -> Iterator[dict[str, np.ndarray]]:
    """count: [rows, 1] INT32. Yields so many responses; each token: [rows, 1] INT32 is its number."""
    for number in range(count.max()):
        yield {"token": np.full_like(count, number)}


def bind_echo(triton: Triton, name: str = "echo", dtype: type[np.generic] = np.float32) -> None:
    triton.bind(
        model_name=name,
        infer_func=echo,
        inputs=[Tensor(name="x", dtype=dtype, shape=(-1,))],
        outputs=[Tensor(name="y", dtype=dtype, shape=(-1,))],
        config=ModelConfig(max_batch_size=64, batcher=DynamicBatcher()),
    )


def bind_tokens(triton: Triton) -> None:
    triton.bind(
        model_name="tokens",
        infer_func=tokens,
        inputs=[Tensor(name="count", dtype=np.int32, shape=(1,))],
        outputs=[Tensor(name="token", dtype=np.int32, shape=(1,))],
        config=ModelConfig(max_batch_size=64, batcher=DynamicBatcher(), decoupled=True),
    )


def bind_eight_inputs(triton: Triton) -> None:
    """The model with eight inputs, of which it returns the first."""
    triton.bind(
        model_name="eight-inputs",
        infer_func=eight_inputs,
        inputs=[Tensor(name=name, dtype=np.float32, shape=(-1,)) for name in "abcdefgh"],
        outputs=[Tensor(name="y", dtype=np.float32, shape=(-1,))],
        config=ModelConfig(max_batch_size=64, batcher=DynamicBatcher()),
    )


def bind_echo_read_only(triton: Triton) -> None:
    """The model echo again: here nothing is known of inputs that are only read."""
    bind_echo(triton, "echo-read-only")


def bind_echo_bytes(triton: Triton) -> None:
    bind_echo(triton, "echo-bytes", np.bytes_)


def bind_echo_unbatched(triton: Triton) -> None:
    """Bind the model echo without batching."""
    triton.bind(
        model_name="echo-unbatched",
        infer_func=echo_one,
        inputs=[Tensor(name="x", dtype=np.float32, shape=(-1,))],
        outputs=[Tensor(name="y", dtype=np.float32, shape=(-1,))],
        config=ModelConfig(batching=False),
    )


BIND = {
    "echo": bind_echo,
    "echo-read-only": bind_echo_read_only,
    "echo-bytes": bind_echo_bytes,
    "echo-unbatched": bind_echo_unbatched,
    "eight-inputs": bind_eight_inputs,
    "tokens": bind_tokens,
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
            BIND[name](triton)
        triton.serve()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4:])
