"""Asks for products and checks them: ``client.py``"""

from __future__ import annotations

import argparse
import sys

import numpy as np

from gpuserve.client import ClientError, ModelClient

INPUTS, OUTPUTS = 512, 256


def main() -> None:
    """Prints how many rows were right; exits 1 where one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20, help="how many (default: %(default)s)")
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    arguments = parser.parse_args()
    weights = np.arange(INPUTS * OUTPUTS, dtype=np.float32).reshape(INPUTS, OUTPUTS) % 7
    right = 0
    try:
        with ModelClient(f"grpc://{arguments.url}", "linear") as client:
            for number in range(arguments.requests):
                x = (np.arange(4 * INPUTS, dtype=np.float32).reshape(4, INPUTS) + number) % 5
                answer = client.infer_batch(x=x)
                right += int((answer["y"] == x @ weights).all(axis=1).sum())
    except ClientError as error:
        sys.exit(f"client.py: {error}")
    if right != 4 * arguments.requests:
        sys.exit("client.py: an answer is wrong")
    print(f"{right} rows are right")


if __name__ == "__main__":
    main()
