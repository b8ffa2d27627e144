"""Serves a model through the server of another program: ``join.py [URL]``"""

from __future__ import annotations

import argparse
import sys

from temperatures import TEMPERATURE, to_kelvin

from gpuserve import ModelConfig, Server
from gpuserve.errors import AttachError


def main() -> None:
    """Serves until SIGINT or SIGTERM, or until the server ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?", default="localhost:8000", help="one of the server's ports")
    try:
        with Server.attach(parser.parse_args().url) as server:
            tensors = [TEMPERATURE]
            server.bind("kelvin", to_kelvin, tensors, tensors, config=ModelConfig(max_batch_size=16))
            print("kelvin is served", file=sys.stderr, flush=True)
            server.serve()
    except AttachError as error:
        sys.exit(f"join.py: {error}")


if __name__ == "__main__":
    main()
