"""The server of ``config.yaml`` as a Python program: ``bind.py [DEVICE...]``"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from linear import INPUT_FEATURES, Linear

from gpuserve import ModelConfig, Server, Tensor

FEATURES = 30


def main() -> None:
    """Serves the layer, one process for each device, until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("devices", nargs="*", default=["cpu", "cpu"], metavar="DEVICE")
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--metrics-port", type=int, default=8002)
    settings = vars(parser.parse_args())
    devices = settings.pop("devices")

    with Server(**settings) as server:
        server.bind(
            model_name="linear",
            infer_func=[Linear(FEATURES, device) for device in devices],
            inputs=[Tensor(name="x", dtype=np.float32, shape=(INPUT_FEATURES,))],
            outputs=[Tensor(name="y", dtype=np.float32, shape=(FEATURES,))],
            config=ModelConfig(max_batch_size=16),
        )
        server.run()
        http, grpc, metrics = (server.addresses[name] for name in ("http", "grpc", "metrics"))
        print(f"ready: HTTP {http}, gRPC {grpc}, metrics {metrics}", file=sys.stderr)
        server.serve()


if __name__ == "__main__":
    main()
