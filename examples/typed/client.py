"""Asks for the summary of an image: all of it, a part of it, and in percent."""

from __future__ import annotations

import argparse

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import np_to_triton_dtype


def ask(
    client: InferenceServerClient, parameters: dict[str, float] | None = None, **arrays: np.ndarray
) -> str:
    inputs = []
    for name, array in arrays.items():
        one = InferInput(name, [1, *array.shape], np_to_triton_dtype(array.dtype))
        one.set_data_from_numpy(array[None])
        inputs.append(one)
    answer = client.infer("summarize", inputs, parameters=parameters)
    row, column = answer.as_numpy("brightest")[0]
    return f"mean {answer.as_numpy('mean')[0]:.2f}, brightest at row {row}, column {column}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001", help="the gRPC port")
    url = parser.parse_args().url
    image = np.arange(0, 240, 10, dtype=np.uint8).reshape(4, 6)
    top = np.zeros_like(image, dtype=bool)
    top[:2] = True
    with InferenceServerClient(url) as client:
        print("the image   ", ask(client, image=image))
        print("its top half", ask(client, image=image, mask=top))
        print("in percent  ", ask(client, {"scale": 100.0}, image=image))


if __name__ == "__main__":
    main()
