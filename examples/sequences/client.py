"""Reports the readings of several meters at the same time, and prints their means: ``client.py``"""

from __future__ import annotations

import argparse
import asyncio
import sys

import numpy as np

from gpuserve.client import AsyncioModelClient, ClientError

READINGS = {
    "cellar": [11.0, 11.5, 12.0, 11.5],
    "kitchen": [19.0, 21.0, 23.5, 22.0, 20.5],
    "roof": [4.0, 31.0, 7.0],
}


async def report(client: AsyncioModelClient, meter: str, readings: list[float]) -> str:
    """The means of a meter after each of its readings. The server needs to know the first and the last."""
    means = []
    for position, reading in enumerate(readings):
        answer = await client.infer_sample(
            np.array([reading], np.float32),
            parameters={
                "sequence_id": meter,
                "sequence_start": position == 0,
                "sequence_end": position == len(readings) - 1,
            },
        )
        means.append(f"{answer['mean'].item():.2f}")
    return f"{meter}: {' '.join(means)}"


async def report_all(url: str) -> list[str]:
    """All meters at once: their requests interleave, and each sequence stays its own."""
    async with AsyncioModelClient(f"grpc://{url}", "running_mean") as client:
        return await asyncio.gather(*(report(client, *meter) for meter in READINGS.items()))


def main() -> None:
    """Prints a line for each meter."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    try:
        lines = asyncio.run(report_all(parser.parse_args().url))
    except ClientError as error:
        sys.exit(f"client.py: {error}")
    print(*lines, sep="\n")


if __name__ == "__main__":
    main()
