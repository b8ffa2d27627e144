"""A client written for PyTriton: ``client.py``"""

from __future__ import annotations

import argparse

import numpy as np
from pytriton.client import ModelClient


def main() -> None:
    """Prints what some goods cost with tax."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    amounts = np.array([12.5, 7.25, 100.0])
    with ModelClient(f"grpc://{parser.parse_args().url}", "add_up", init_timeout_s=30) as client:
        for rate in (0.0, 0.07, 0.19):
            total = client.infer_sample(amounts=amounts, rate=np.array([rate]))["total"]
            print(f"{amounts.sum():.2f} at {rate:.0%}: {total[0]:.2f}")


if __name__ == "__main__":
    main()
