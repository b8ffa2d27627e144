"""Asks for what is near to known vectors, many requests at a time, and checks every answer: ``client.py``"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from nearest import DIMENSIONS, table
from numpy.typing import NDArray
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

IN_FLIGHT = 16


def nearest(client: InferenceServerClient, query: NDArray[np.float32]) -> NDArray[np.int64]:
    """The positions of the nearest vectors, int64 [rows, 1]. ``query``: float32 [rows, 64]."""
    tensor = InferInput("query", query.shape, "FP32")
    tensor.set_data_from_numpy(query)
    index: NDArray[np.int64] = client.infer("nearest", [tensor]).as_numpy("index")
    return index


def wrong_answers(url: str, requests: int, count: int) -> int:
    """Sends the requests, of one row each; how many answers are not the vector that the query was made of."""
    generator = np.random.default_rng(1)
    wanted = generator.integers(count, size=requests)
    noise = 0.01 * generator.standard_normal((requests, DIMENSIONS), dtype=np.float32)
    queries = table(count)[wanted] + noise
    with InferenceServerClient(url) as client, ThreadPoolExecutor(IN_FLIGHT) as pool:
        found = list(pool.map(lambda query: nearest(client, query[None]), queries))
    return int((np.concatenate(found)[:, 0] != wanted).sum())


def main() -> None:
    """Prints that every answer is right; exits 1 where one is not."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200, help="how many (default: %(default)s)")
    parser.add_argument(
        "--count", type=int, default=10_000, help="the model's vectors (default: %(default)s)"
    )
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        wrong = wrong_answers(arguments.url, arguments.requests, arguments.count)
    except InferenceServerException as failure:
        sys.exit(f"client.py: {failure}")
    if wrong:
        sys.exit(f"client.py: {wrong} of {arguments.requests} answers are wrong")
    print(f"{arguments.requests} requests, every answer right")


if __name__ == "__main__":
    main()
