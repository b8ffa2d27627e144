"""Prints what a model writes after a prompt, as it comes: ``client.py [PROMPT]``"""

from __future__ import annotations

import argparse
import queue
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException


def write(
    client: InferenceServerClient, prompt: str, parameters: dict[str, Any]
) -> Iterator[tuple[str, str]]:
    """The pieces of the text, each with why it is the last, or with nothing."""
    came: queue.Queue[Any] = queue.Queue()
    tensor = InferInput("prompt", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[prompt.encode()]], dtype=object))
    client.start_stream(lambda result, error: came.put(error or result))
    client.async_stream_infer("writer", [tensor], parameters=parameters)
    reason = ""
    while not reason:
        result = came.get()
        if isinstance(result, InferenceServerException):
            raise result
        reason = result.as_numpy("finish_reason")[0, 0].decode()
        yield result.as_numpy("text")[0, 0].decode(), reason
    client.stop_stream()


def main() -> None:
    """Prints the prompt and what comes after it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="The grand")
    parser.add_argument("--tokens", type=int, default=400, help="at most so many (default: %(default)s)")
    parser.add_argument("--temperature", type=float, default=0, help="0 writes the likeliest (default)")
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    arguments = parser.parse_args()
    asked = {"max_new_tokens": arguments.tokens, "temperature": arguments.temperature}
    print(arguments.prompt, end="", flush=True)
    try:
        with InferenceServerClient(arguments.url) as client:
            for piece, _ in write(client, arguments.prompt, asked):
                print(piece, end="", flush=True)
    except InferenceServerException as error:
        sys.exit(f"client.py: {error}")
    print()


if __name__ == "__main__":
    main()
