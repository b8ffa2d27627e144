"""Serves the counter of primes, one process for each instance: ``serve.py [--instances N]``"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from primes import count_primes

from gpuserve import ModelConfig, Server, Tensor


def main() -> None:
    """Serves until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--metrics-port", type=int, default=8002)
    settings = vars(parser.parse_args())
    instances = settings.pop("instances")
    with Server(**settings) as server:
        server.bind(
            model_name="primes",
            infer_func=[count_primes] * instances,
            inputs=[Tensor(name="limit", shape=(1,), dtype=np.int64)],
            outputs=[Tensor(name=name, shape=(1,), dtype=np.int64) for name in ("primes", "instance")],
            config=ModelConfig(max_batch_size=4),
        )
        server.run()
        http, grpc, metrics = (server.addresses[name] for name in ("http", "grpc", "metrics"))
        print(f"ready: HTTP {http}, gRPC {grpc}, metrics {metrics}", file=sys.stderr)
        server.serve()


if __name__ == "__main__":
    main()
