"""Trains the classifier and asks it after every lesson: ``client.py``"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from classifier import FEATURES
from numpy.typing import NDArray

from gpuserve.client import ClientError, ModelClient

ROWS = 100


def samples(generator: np.random.Generator) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Points, and on which side of a plane they are."""
    x = generator.standard_normal((ROWS, FEATURES), dtype=np.float32)
    return x, (x.sum(axis=1) > 0.5).astype(np.int64)[:, None]


def main() -> None:
    """Prints how many of 100 points are told right, before the first lesson and after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lessons", type=int, default=4, help="how many (default: %(default)s)")
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    arguments = parser.parse_args()
    url = f"grpc://{arguments.url}"
    generator = np.random.default_rng(7)
    x, label = samples(generator)
    try:
        with ModelClient(url, "train") as train, ModelClient(url, "infer") as infer:
            for lesson in range(arguments.lessons + 1):
                right = int((infer.infer_batch(x)["label"] == label).sum())
                print(f"lessons: {lesson}, right: {right} of {ROWS}")
                train.infer_batch(*samples(generator))
    except ClientError as error:
        sys.exit(f"client.py: {error}")


if __name__ == "__main__":
    main()
