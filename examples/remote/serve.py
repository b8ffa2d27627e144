"""A server with one model of its own, which others may join: ``serve.py``"""

from __future__ import annotations

import argparse
import sys

from temperatures import TEMPERATURE, to_fahrenheit

from gpuserve import ModelConfig, Server


def main() -> None:
    """Serves until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--metrics-port", type=int, default=8002)
    with Server(**vars(parser.parse_args())) as server:
        tensors = [TEMPERATURE]
        server.bind("fahrenheit", to_fahrenheit, tensors, tensors, config=ModelConfig(max_batch_size=16))
        server.run()
        http, grpc, metrics = (server.addresses[name] for name in ("http", "grpc", "metrics"))
        print(f"ready: HTTP {http}, gRPC {grpc}, metrics {metrics}", file=sys.stderr)
        server.serve()


if __name__ == "__main__":
    main()
