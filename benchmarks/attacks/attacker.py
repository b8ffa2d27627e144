"""``python -m benchmarks.attacks.attacker NAME HTTP GRPC SECONDS``: one attack; then its connections go."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from benchmarks.attacks.catalog import ATTACKS
from benchmarks.attacks.connections import Address, Victim


def main(arguments: Sequence[str]) -> None:
    """Attack at ``host:port`` addresses for so long."""
    name, http, grpc, seconds = arguments
    os.nice(10)  # whom it shares the machine with is measured
    ATTACKS[name](Victim(address(http), address(grpc), time.monotonic() + float(seconds)))


def address(text: str) -> Address:
    """The host and the port."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


if __name__ == "__main__":
    main(sys.argv[1:])
