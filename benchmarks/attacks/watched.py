"""The server as the machine and its own metrics see it: memory and open descriptors of all its processes, and
what requests hold.
"""

from __future__ import annotations

import http.client
import os
import ssl
from typing import Final, NamedTuple

from benchmarks.processes import tree

#: Gauges of what requests hold, which is nothing when no request is there.
_HELD: Final = ("gpuserve_arena_blocks", "gpuserve_door_arena_blocks", "gpuserve_intake_bytes")
_TIMEOUT_S: Final = 5.0


class Held(NamedTuple):
    """What a server holds at one moment; a page that several of its processes have counts once."""

    nbytes: int
    descriptors: int


def held(root_pid: int) -> Held:
    """Return what the process and its descendants hold; nothing of those that are gone."""
    nbytes = descriptors = 0
    for one in tree(root_pid):
        try:
            nbytes += one.memory.pss_nbytes
            descriptors += len(os.listdir(f"/proc/{one.pid}/fd"))
        except (FileNotFoundError, ProcessLookupError):
            continue
    return Held(nbytes, descriptors)


def held_by_requests(metrics: str) -> int:
    """Return blocks and bytes that requests hold, by the metrics page at this address, which speaks TLS.

    Raises:
        OSError: The page does not answer.
    """
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    connection = http.client.HTTPSConnection(metrics, timeout=_TIMEOUT_S, context=context)
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    finally:
        connection.close()
    return sum(int(float(line.rpartition(" ")[2])) for line in lines if line.startswith(_HELD))
