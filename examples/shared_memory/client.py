"""Sends images through shared memory, with nothing but tritonclient: ``client.py``"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.utils.shared_memory as shm
from numpy.typing import NDArray
from tritonclient.utils import InferenceServerException

NAME, KEY = "images", "/gpuserve-example-images"
SHAPE = (1080, 1920, 3)


def infer_in_region(client: grpcclient.InferenceServerClient, nbytes: int) -> None:
    """Let the image at the start of the region be inverted into the place behind it."""
    image = grpcclient.InferInput("image", list(SHAPE), "UINT8")
    image.set_shared_memory(NAME, nbytes)
    answer = grpcclient.InferRequestedOutput("image")
    answer.set_shared_memory(NAME, nbytes, offset=nbytes)
    client.infer("invert", [image], outputs=[answer])


def infer_in_message(client: grpcclient.InferenceServerClient, given: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The same without shared memory."""
    image = grpcclient.InferInput("image", list(SHAPE), "UINT8")
    image.set_data_from_numpy(given)
    return np.asarray(client.infer("invert", [image]).as_numpy("image"))


def run(client: grpcclient.InferenceServerClient, times: int) -> None:
    """Prints whether both ways answer the same, and which one is faster."""
    given = np.random.default_rng(0).integers(0, 256, SHAPE, np.uint8)
    region = shm.create_shared_memory_region(NAME, KEY, 2 * given.nbytes)
    try:
        client.register_system_shared_memory(NAME, KEY, 2 * given.nbytes)
        shm.set_shared_memory_region(region, [given])
        started = time.monotonic()
        for _ in range(times):
            infer_in_region(client, given.nbytes)
        between = time.monotonic()
        for _ in range(times):
            sent = infer_in_message(client, given)
        ended = time.monotonic()
        found = shm.get_contents_as_numpy(region, np.uint8, list(SHAPE), offset=given.nbytes)
        right = np.array_equal(found, 255 - given) and np.array_equal(found, sent)
        print("every pixel right" if right else "wrong")
        print(f"{(ended - between) / (between - started):.1f} times as fast as in messages")
    finally:
        client.unregister_system_shared_memory(NAME)
        shm.destroy_shared_memory_region(region)


def main() -> None:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    parser.add_argument("--times", type=int, default=20, help="images (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        with grpcclient.InferenceServerClient(arguments.url) as client:
            run(client, arguments.times)
    except InferenceServerException as error:
        sys.exit(f"client.py: {error}")


if __name__ == "__main__":
    main()
