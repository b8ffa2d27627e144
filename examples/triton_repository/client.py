"""Asks the models of the repository, with Triton's client: ``client.py TEXT …``"""

from __future__ import annotations

import argparse
import queue
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException


def text_input(values: Any) -> grpcclient.InferInput:
    array = np.array(values, np.object_)
    tensor = grpcclient.InferInput("text", array.shape, "BYTES")
    tensor.set_data_from_numpy(array)
    return tensor


def count(client: grpcclient.InferenceServerClient, texts: list[str]) -> list[int]:
    answer = client.infer("words", [text_input([[text.encode()] for text in texts])])
    return [int(row[0]) for row in answer.as_numpy("count")]


def letters(client: grpcclient.InferenceServerClient, text: str) -> list[str]:
    """The letters as they came, and the number of words after them."""
    came: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: came.put(error or result))
    client.async_stream_infer("letters", [text_input([text.encode()])], enable_empty_final_response=True)
    found: list[str] = []
    while True:
        result = came.get()
        if isinstance(result, InferenceServerException):
            raise result
        if result.get_response().parameters["triton_final_response"].bool_param:
            client.stop_stream()
            return found
        found.append(result.as_numpy("letter")[0].decode())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("texts", nargs="*", default=["one two three", "four"])
    parser.add_argument("--url", default="localhost:8001")
    arguments = parser.parse_args()
    with grpcclient.InferenceServerClient(arguments.url) as client:
        for text, words in zip(arguments.texts, count(client, arguments.texts), strict=True):
            print(f"{text!r} has {words} word{'s' if words != 1 else ''}")
        print("-".join(letters(client, arguments.texts[-1])))
        try:
            count(client, [""])
        except InferenceServerException as error:
            print(f"{error.status()}: {error.message()}")


if __name__ == "__main__":
    main()
