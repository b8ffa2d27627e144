"""Asks for one dull image four times, each time with other inputs: ``client.py``"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuserve.client import AsyncioModelClient, ClientError

CHOICES: dict[str, dict[str, float]] = {
    "defaults": {},
    "cut_percent 10": {"cut_percent": 10.0},
    "gamma 2": {"gamma": 2.0},
    "cut_percent 10, gamma 2": {"cut_percent": 10.0, "gamma": 2.0},
}


def dull_image() -> NDArray[np.uint8]:
    """A ramp from grey 100 to grey 150 that is 51 pixels wide, uint8 [40, 51]."""
    return np.tile(np.arange(100, 151, dtype=np.uint8), (40, 1))


def described(image: NDArray[np.uint8]) -> str:
    """How dark and how bright the image is, and how much of it is black or white."""
    at_the_ends = np.isin(image, [0, 255]).mean()
    return f"{image.min()} to {image.max()}, mean {image.mean():.0f}, {at_the_ends:.0%} black or white"


async def stretch_all(url: str) -> list[NDArray[np.uint8]]:
    """The image after each of the choices. All requests are sent at once."""
    async with AsyncioModelClient(f"grpc://{url}", "contrast") as client:
        calls = [client.infer_sample(**inputs(choice)) for choice in CHOICES.values()]
        return [answer["image"] for answer in await asyncio.gather(*calls)]


def inputs(choice: dict[str, float]) -> dict[str, Any]:
    """The inputs of a request: the image, and what was chosen."""
    return {"image": dull_image()} | {name: np.array([value], np.float32) for name, value in choice.items()}


def main() -> None:
    """Prints what the image is like, and what each choice makes of it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        images = asyncio.run(stretch_all(arguments.url))
    except ClientError as error:
        sys.exit(f"client.py: {error}")
    for name, image in zip(["the image", *CHOICES], [dull_image(), *images], strict=True):
        print(f"{name:<24} {described(image)}")


if __name__ == "__main__":
    main()
