"""Asks the quickstart server what files hold: ``client.py FILE...``"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException


def identify(client: InferenceServerClient, content: bytes) -> tuple[str, float]:
    """The label of the content, and how sure the model is of it, 0 to 1."""
    tensor = InferInput("content", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[content]], dtype=object))
    result = client.infer("content_type", [tensor])
    return result.as_numpy("label")[0, 0].decode(), float(result.as_numpy("score")[0, 0])


def main() -> None:
    """Prints one line a file: label, score, path."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        with InferenceServerClient(arguments.url) as client:
            for path in arguments.files:
                label, score = identify(client, path.read_bytes())
                print(f"{label:<12} {score:.3f}  {path}")
    except (InferenceServerException, OSError) as error:
        sys.exit(f"client.py: {error}")


if __name__ == "__main__":
    main()
