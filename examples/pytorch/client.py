"""Sends two signals, and prints how rough they were, and are."""

from __future__ import annotations

import argparse
import sys

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    steps = np.arange(16)
    signals = {"zigzag": steps % 2, "stairs": steps // 4}
    rows = np.stack(list(signals.values())).astype(np.float32)
    tensor = InferInput("signal", list(rows.shape), "FP32")
    tensor.set_data_from_numpy(rows)
    try:
        with InferenceServerClient(parser.parse_args().url) as client:
            roughness = client.infer("smooth", [tensor]).as_numpy("roughness")
    except InferenceServerException as error:
        sys.exit(f"client.py: {error}")
    for name, (before, after) in zip(signals, roughness, strict=True):
        print(f"{name}: {before:.2f} before, {after:.2f} after")


if __name__ == "__main__":
    main()
