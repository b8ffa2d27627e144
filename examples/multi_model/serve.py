"""Serves a classifier that is trained by one model and asked by another: ``serve.py``"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from classifier import FEATURES, Classifier

from gpuserve import ModelConfig, Server, Tensor

X = Tensor(name="x", shape=(FEATURES,), dtype=np.float32)
LABEL = Tensor(name="label", shape=(1,), dtype=np.int64)
LOSS = Tensor(name="loss", shape=(1,), dtype=np.float32)


def main() -> None:
    """Serves until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--metrics-port", type=int, default=8002)
    classifier = Classifier()
    config = ModelConfig(max_batch_size=128)
    with Server(**vars(parser.parse_args())) as server:
        # In threads of this program: in worker processes each model would have an object of its own.
        server.bind("train", classifier.train, [X, LABEL], [LOSS], config=config, isolation="thread")
        server.bind("infer", classifier.infer, [X], [LABEL], config=config, isolation="thread")
        server.run()
        http, grpc, metrics = (server.addresses[name] for name in ("http", "grpc", "metrics"))
        print(f"ready: HTTP {http}, gRPC {grpc}, metrics {metrics}", file=sys.stderr)
        server.serve()


if __name__ == "__main__":
    main()
