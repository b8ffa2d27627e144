"""Sends random rows to the linear model, many requests at a time, and checks every answer: ``client.py``"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from linear import INPUT_FEATURES, parameters
from numpy.typing import NDArray
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

IN_FLIGHT = 16


def infer(client: InferenceServerClient, x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The model's answer to one request. ``x``: float32 [rows, 20]."""
    tensor = InferInput("x", x.shape, "FP32")
    tensor.set_data_from_numpy(x)
    y: NDArray[np.float32] = client.infer("linear", [tensor]).as_numpy("y")
    return y


def largest_error(url: str, requests: int) -> float:
    """Sends the requests, of 1 to 4 rows each; the largest distance of an answer from x W + b."""
    generator = np.random.default_rng()
    xs = [
        generator.standard_normal((rows, INPUT_FEATURES), dtype=np.float32)
        for rows in generator.integers(1, 5, size=requests)
    ]
    with InferenceServerClient(url) as client, ThreadPoolExecutor(IN_FLIGHT) as pool:
        ys = list(pool.map(lambda x: infer(client, x), xs))
    weight, bias = parameters(features=ys[0].shape[1])
    return max(float(np.abs(x @ weight + bias - y).max()) for x, y in zip(xs, ys, strict=True))


def main() -> None:
    """Prints how far the answers are from what they should be; exits 1 where that is too far."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200, help="how many (default: %(default)s)")
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        error = largest_error(arguments.url, arguments.requests)
    except InferenceServerException as failure:
        sys.exit(f"client.py: {failure}")
    if error > 1e-3:
        sys.exit(f"client.py: an answer is wrong by {error:.3g}")
    print(f"{arguments.requests} requests, every answer right")


if __name__ == "__main__":
    main()
