"""Sends receipts through three models: one by one, then all at once: ``client.py``"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import numpy as np

from gpuserve.client import AsyncioModelClient, ClientError

RECEIPTS = [f"Market\nbread {n}.50\nmilk 1,{n}9\n\nthank you\n".encode() for n in range(1, 9)]


class Pipeline:
    """The three models behind each other; what one answers is what the next is asked."""

    def __init__(
        self, split: AsyncioModelClient, amounts: AsyncioModelClient, total: AsyncioModelClient
    ) -> None:
        self._split = split
        self._amounts = amounts
        self._total = total

    async def read(self, receipt: bytes) -> str:
        """The sum of a receipt."""
        lines = await self._split.infer_sample(np.array([receipt], dtype=object))
        cents = await self._amounts.infer_sample(lines["lines"])
        answer = await self._total.infer_sample(cents["cents"])
        total: bytes = answer["total"][0]
        return total.decode()


async def run(url: str) -> None:
    """Prints the sums, and how much faster it is when the models work on several receipts at a time."""
    async with (
        AsyncioModelClient(url, "split") as split,
        AsyncioModelClient(url, "amounts") as amounts,
        AsyncioModelClient(url, "total") as total,
    ):
        pipeline = Pipeline(split, amounts, total)
        await pipeline.read(RECEIPTS[0])  # the clients learn of their models
        started = time.monotonic()
        one_by_one = [await pipeline.read(receipt) for receipt in RECEIPTS]
        between = time.monotonic()
        at_once = await asyncio.gather(*map(pipeline.read, RECEIPTS))
        ended = time.monotonic()
    print(" ".join(one_by_one))
    print("the same all at once" if at_once == one_by_one else "something else all at once")
    print(f"{(between - started) / (ended - between):.1f} times as fast")


def main() -> None:
    """Runs the pipeline."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    try:
        asyncio.run(run(f"grpc://{parser.parse_args().url}"))
    except ClientError as error:
        sys.exit(f"client.py: {error}")


if __name__ == "__main__":
    main()
