"""Asks for the names of colours that are given in three ways, all at once: ``client.py``"""

from __future__ import annotations

import argparse
import asyncio
import sys
from typing import Any

import numpy as np

from gpuserve.client import AsyncioModelClient, ClientError

# What to call each request, its colour, and how many names it wants.
QUESTIONS: list[tuple[str, dict[str, Any], int]] = [
    ("RGB 250, 150, 20", {"light": np.array([250, 150, 20], np.float32)}, 3),
    ("RGB 10, 20, 200", {"light": np.array([10, 20, 200], np.float32)}, 1),
    ("grey 140", {"light": np.array([140], np.float32)}, 2),
    ("teal", {"name": np.array([b"teal"])}, 3),
    ("pink", {"name": np.array([b"pink"])}, 2),
    ("mud", {"name": np.array([b"mud"])}, 2),
]


async def ask(client: AsyncioModelClient, colour: dict[str, Any], count: int) -> str:
    """The nearest names and how far they are."""
    answer = await client.infer_sample(**colour, count=np.array([count], np.int32))
    found = [
        f"{name.decode()} ({distance:.0f})"
        for name, distance in zip(answer["names"], answer["distances"], strict=True)
        if name  # the others are padding: a request of its batch wanted more
    ]
    return ", ".join(found) or "no such colour"


async def ask_all(url: str) -> list[str]:
    """The answers to all questions, which are sent at once."""
    async with AsyncioModelClient(f"grpc://{url}", "nearest_colours") as client:
        return await asyncio.gather(*(ask(client, colour, count) for _, colour, count in QUESTIONS))


def main() -> None:
    """Prints a line for each question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    try:
        answers = asyncio.run(ask_all(parser.parse_args().url))
    except ClientError as error:
        sys.exit(f"client.py: {error}")
    for (title, _, _), answer in zip(QUESTIONS, answers, strict=True):
        print(f"{title}: {answer}")


if __name__ == "__main__":
    main()
