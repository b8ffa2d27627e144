"""Ranks sentences by how near their meaning is to the first: ``client.py SENTENCE SENTENCE...``"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from numpy.typing import NDArray
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException


def embed(client: InferenceServerClient, sentences: list[str]) -> NDArray[np.float32]:
    """The embeddings, float32 [len(sentences), 384], each of length 1. One request with all sentences."""
    tensor = InferInput("sentence", [len(sentences), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[sentence.encode()] for sentence in sentences], dtype=object))
    embeddings: NDArray[np.float32] = client.infer("embeddings", [tensor]).as_numpy("embedding")
    return embeddings


def main() -> None:
    """Prints one line a sentence, nearest first: its cosine similarity to the first, and the sentence."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sentences", nargs="+", metavar="SENTENCE")
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        with InferenceServerClient(arguments.url) as client:
            embeddings = embed(client, arguments.sentences)
    except InferenceServerException as error:
        sys.exit(f"client.py: {error}")
    similarities = embeddings @ embeddings[0]
    for position in np.argsort(-similarities, kind="stable"):
        print(f"{similarities[position]:6.3f}  {arguments.sentences[position]}")


if __name__ == "__main__":
    main()
