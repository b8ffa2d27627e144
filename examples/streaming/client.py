"""Prints a story word by word as it comes, then several at once: ``client.py [PROMPT...]``"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import numpy as np
from numpy.typing import NDArray

from gpuserve.client import AsyncioDecoupledModelClient, ClientError, DecoupledModelClient


def inputs(prompt: str, count: int) -> tuple[NDArray[np.object_], NDArray[np.int32]]:
    """The inputs of one story, in the order in which the model declares them: ``prompt``, ``count``."""
    return np.array([prompt.encode()], dtype=object), np.array([count], dtype=np.int32)


def tell(url: str, prompt: str, count: int) -> None:
    """Prints the words of one story, each when it is there."""
    with DecoupledModelClient(url, "words") as client:
        for response in client.infer_sample(*inputs(prompt, count)):
            print(response["word"][0].decode(), end=" ", flush=True)
    print()


async def tell_all(url: str, prompts: list[str], count: int) -> list[str]:
    """Several stories at once, each over a stream of its own."""

    async def one(prompt: str) -> str:
        async with AsyncioDecoupledModelClient(url, "slow_words") as client:
            words = [
                response["word"][0].decode() async for response in client.infer_sample(*inputs(prompt, count))
            ]
        return " ".join(words)

    return await asyncio.gather(*map(one, prompts))


def main() -> None:
    """Prints a story for the first prompt, then how long all prompts took at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="*", default=["The", "A worker", "SIGTERM"], metavar="PROMPT")
    parser.add_argument("--count", type=int, default=12, help="words of each story (default: %(default)s)")
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    arguments = parser.parse_args()
    url = f"grpc://{arguments.url}"
    try:
        tell(url, arguments.prompts[0], arguments.count)
        started = time.monotonic()
        stories = asyncio.run(tell_all(url, arguments.prompts, arguments.count))
        took_s = time.monotonic() - started
    except ClientError as error:
        sys.exit(f"client.py: {error}")
    for story in stories:
        print(story)
    print(f"{len(stories)} at once, {arguments.count} words each: {took_s:.1f} s")


if __name__ == "__main__":
    main()
