"""Serves a model through the server of another program: ``join.py MODEL [URL]``"""

from __future__ import annotations

import argparse
import sys

from temperatures import TEMPERATURE, to_kelvin, to_rankine

from gpuserve import ModelConfig, Server, errors

MODELS = {"kelvin": to_kelvin, "rankine": to_rankine}


def main() -> None:
    """Serves until SIGINT or SIGTERM, or until the server ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", choices=MODELS, help="what to serve: %(choices)s", metavar="MODEL")
    parser.add_argument("url", nargs="?", default="localhost:8000", help="one of the server's ports")
    arguments = parser.parse_args()
    model, tensors = arguments.model, [TEMPERATURE]
    try:
        with Server.attach(arguments.url) as server:
            server.bind(model, MODELS[model], tensors, tensors, config=ModelConfig(max_batch_size=16))
            print(f"{model} is served", file=sys.stderr, flush=True)
            server.serve()
    except errors.AttachError as error:
        sys.exit(f"join.py: {error}")


if __name__ == "__main__":
    main()
