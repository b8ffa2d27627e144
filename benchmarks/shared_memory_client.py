"""The client whose tensors lie in system shared memory: a program of its own, one request in flight.

``python -m benchmarks.shared_memory_client PORT METHOD SECONDS NBYTES REQUEST``: the last is a file, the
message that is sent over and over through a bare channel of grpcio. It names the regions ``INPUT`` and
``OUTPUT``, each of so many bytes. stdout gets one line of JSON; a wrong answer ends the program with 1.

The input is written once and the output is read once, at the end: what is timed is the way to the server and
back, the same for every server, and not what a client does with its own memory.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import grpc
import numpy as np
import tritonclient.grpc as grpc_client
from tritonclient.utils import InferenceServerException, shared_memory

INPUT: Final = "benchmark-input"
OUTPUT: Final = "benchmark-output"
_TIMEOUT_S: Final = 30
_RETRY_S: Final = 0.01


class SharedMemoryFailed(Exception):
    """The server did not write the right answer into the region of the client."""


def run(port: int, method: str, seconds: float, nbytes: int, message: bytes) -> dict[str, Any]:
    """Send the message again and again for this long, at least once.

    The input is FP32, and the output has to be the same; no byte of it is right before. Raises
    SharedMemoryFailed: it is not; grpc.RpcError, InferenceServerException: a call failed.
    """
    numbers = np.arange(nbytes // 4, dtype=np.float32)
    latencies_s: list[float] = []
    with ExitStack() as stack:
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{port}"))
        client = stack.enter_context(grpc_client.InferenceServerClient(f"127.0.0.1:{port}"))
        given, answer = (stack.enter_context(_region(client, name, nbytes)) for name in (INPUT, OUTPUT))
        shared_memory.set_shared_memory_region(given, [numbers])
        shared_memory.set_shared_memory_region(answer, [~numbers.view(np.uint32)])
        call = channel.unary_unary(method)
        now = began_at = time.perf_counter()
        while not latencies_s or now < began_at + seconds:
            call(message, timeout=_TIMEOUT_S)
            ended_at = time.perf_counter()
            latencies_s.append(ended_at - now)
            now = ended_at
        written = shared_memory.get_contents_as_numpy(answer, np.float32, numbers.shape)
        if not np.array_equal(written, numbers):
            raise SharedMemoryFailed(f"the output region of {nbytes} bytes does not hold the input")
    return {"took_s": now - began_at, "latencies_s": latencies_s}


@contextmanager
def _region(client: Any, name: str, nbytes: int) -> Iterator[Any]:
    """A region under this name, known to the server as long as it is there."""
    key = f"/{name}-{os.getpid()}"
    region = shared_memory.create_shared_memory_region(name, key, nbytes)
    try:
        client.register_system_shared_memory(name, key, nbytes)
        try:
            yield region
        finally:
            _unregister(client, name)
    finally:
        shared_memory.destroy_shared_memory_region(region)


def _unregister(client: Any, name: str) -> None:
    """A server may answer a moment before it lets go of the region, and refuse until then."""
    deadline = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            client.unregister_system_shared_memory(name)
            return
        except InferenceServerException:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_S)


def main(port: str, method: str, seconds: str, nbytes: str, file: str) -> int:
    try:
        result = run(int(port), method, float(seconds), int(nbytes), Path(file).read_bytes())
    except (SharedMemoryFailed, InferenceServerException, grpc.RpcError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
