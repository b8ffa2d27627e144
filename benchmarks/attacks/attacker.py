"""``python -m benchmarks.attacks.attacker NAME HTTP GRPC TLS SECONDS``: one attack; then it goes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from benchmarks.attacks.catalog import ATTACKS
from benchmarks.attacks.connections import Address, Victim


def main(arguments: Sequence[str]) -> None:
    """Attack at ``host:port`` addresses for so long."""
    name, http, grpc, tls, seconds = arguments
    os.nice(10)  # whom it shares the machine with is measured
    addresses = map(address, (http, grpc, tls))
    ATTACKS[name](Victim(*addresses, time.monotonic() + float(seconds)))


def address(text: str) -> Address:
    """The host and the port."""
    host, _, port = text.rpartition(":")
    return host.strip("[]"), int(port)


if __name__ == "__main__":
    main(sys.argv[1:])
