"""Asks for the primes below many limits at once, and tells which instance answered: ``client.py``"""

from __future__ import annotations

import argparse
import sys
from collections import Counter

import numpy as np

from gpuserve.client import ClientError, FuturesModelClient

LIMIT = 1_000_000
PRIMES_BELOW_LIMIT = 78_498


def main() -> None:
    """Prints how many requests each instance answered; exits 1 where an answer is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=60, help="how many (default: %(default)s)")
    parser.add_argument("--url", default="localhost:8001", help="gRPC address (default: %(default)s)")
    arguments = parser.parse_args()
    limit = np.array([LIMIT])
    try:
        with FuturesModelClient(f"grpc://{arguments.url}", "primes", max_workers=16) as client:
            futures = [client.infer_sample(limit) for _ in range(arguments.requests)]
            answers = [future.result() for future in futures]
    except ClientError as error:
        sys.exit(f"client.py: {error}")
    if any(answer["primes"][0] != PRIMES_BELOW_LIMIT for answer in answers):
        sys.exit("client.py: an answer is wrong")
    shares = Counter(int(answer["instance"][0]) for answer in answers)
    for number, (_, count) in enumerate(sorted(shares.items())):
        print(f"instance {number}: {count} requests")


if __name__ == "__main__":
    main()
