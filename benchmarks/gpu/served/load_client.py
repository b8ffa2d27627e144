"""A closed loop of requests, a program of its own.

``python -m benchmarks.gpu.served.load_client PORT SECONDS FILE...``: each file is a ModelInferRequest.
Each has a connection and a thread of its own, and is sent again as soon as it is answered. Those that are
answered before all have been answered once are not counted. stdout gets one line of JSON; a call that fails
ends the program with 1.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Final

import grpc

_METHOD: Final = "/inference.GRPCInferenceService/ModelInfer"
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a connection each
)
_TIMEOUT_S: Final = 60.0


class Loop(threading.Thread):
    """One request, again and again, until the time is over."""

    def __init__(self, port: int, message: bytes, seconds: float, started: threading.Barrier) -> None:
        super().__init__()
        self._port, self._message, self._seconds, self._all_answered = port, message, seconds, started
        self.latencies_s: list[float] = []
        self.took_s = 0.0
        self.problem: str | None = None

    def run(self) -> None:
        """See the class."""
        try:
            with grpc.insecure_channel(f"127.0.0.1:{self._port}", options=_OPTIONS) as channel:
                self._loop(channel)
        except grpc.RpcError as error:
            self.problem = f"{error.code().name}: {error.details()}"
            self._all_answered.abort()
        except threading.BrokenBarrierError:
            pass  # another one failed

    def _loop(self, channel: grpc.Channel) -> None:
        call = channel.unary_unary(_METHOD)
        call(self._message, timeout=_TIMEOUT_S)
        self._all_answered.wait(_TIMEOUT_S)
        now = began_at = time.perf_counter()
        while now - began_at < self._seconds:
            call(self._message, timeout=_TIMEOUT_S)
            ended_at = time.perf_counter()
            self.latencies_s.append(ended_at - now)
            now = ended_at
        self.took_s = now - began_at


def main(port: str, seconds: str, *files: str) -> int:
    """Run and print; the exit status."""
    started = threading.Barrier(len(files))
    loops = [Loop(int(port), Path(file).read_bytes(), float(seconds), started) for file in files]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join()
    if problems := [loop.problem for loop in loops if loop.problem]:
        print(problems[0], file=sys.stderr)
        return 1
    rate = sum(len(loop.latencies_s) / loop.took_s for loop in loops)
    print(json.dumps({"answers_per_s": rate, "latencies_s": [s for loop in loops for s in loop.latencies_s]}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
