"""How many requests a second, and how long each takes, with so many in flight: ``client.py``"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time

import numpy as np

from gpuserve.client import AsyncioModelClient, ClientError

FEATURES = 16


async def measure(client: AsyncioModelClient, in_flight: int, requests: int) -> list[float]:
    """Seconds that each request took, with ``in_flight`` of them at a time."""
    x = np.ones(FEATURES, np.float32)
    left = iter(range(requests))
    took_s: list[float] = []

    async def ask() -> None:
        for _ in left:
            started = time.perf_counter()
            await client.infer_sample(x)
            took_s.append(time.perf_counter() - started)

    await asyncio.gather(*(ask() for _ in range(in_flight)))
    return took_s


async def run(url: str, in_flight: list[int], requests: int) -> None:
    """Prints a line for each number in flight."""
    async with AsyncioModelClient(url, "norm") as client:
        await measure(client, 4, 100)  # warm
        for number in in_flight:
            started = time.perf_counter()
            took_s = await measure(client, number, requests)
            rate = requests / (time.perf_counter() - started)
            p50, p99 = np.percentile(took_s, [50, 99]) * 1e3
            print(f"{number:>3} in flight: {rate:>6.0f} requests/s, p50 {p50:.2f} ms, p99 {p99:.2f} ms")


def main() -> None:
    """Measures; the client, which is Python too, is most of what is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--in-flight", type=int, nargs="+", default=[1, 16, 64], metavar="N")
    parser.add_argument("--requests", type=int, default=2000, help="for each (default: %(default)s)")
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    arguments = parser.parse_args()
    try:
        asyncio.run(run(f"grpc://{arguments.url}", arguments.in_flight, arguments.requests))
    except ClientError as error:
        sys.exit(f"client.py: {error}")


if __name__ == "__main__":
    main()
