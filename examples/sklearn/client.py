"""Prints the species of irises, by sizes of their sepals and petals: ``client.py [5.1,3.5,1.4,0.2...]``"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput, InferResult
from tritonclient.utils import InferenceServerException

FLOWERS = ("5.1,3.5,1.4,0.2", "6.7,3.1,4.4,1.4", "6.3,2.9,5.6,1.8")


def ask(client: InferenceServerClient, flowers: list[str]) -> InferResult:
    """One request with all flowers."""
    measures = np.array([[float(one) for one in flower.split(",")] for flower in flowers])
    tensor = InferInput("X", list(measures.shape), "FP64")
    tensor.set_data_from_numpy(measures)
    return client.infer("flowers", [tensor])


def main() -> None:
    """Prints one line a flower: its species, how sure the model is, and its measures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("flowers", nargs="*", default=list(FLOWERS), metavar="FLOWER")
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        with InferenceServerClient(arguments.url) as client:
            answer = ask(client, arguments.flowers)
    except InferenceServerException as error:
        sys.exit(f"client.py: {error}")
    species, sure = answer.as_numpy("predict")[:, 0], answer.as_numpy("predict_proba").max(axis=1)
    for flower, name, share in zip(arguments.flowers, species, sure, strict=True):
        print(f"{name.decode():11} {share:.2f}  {flower}")


if __name__ == "__main__":
    main()
