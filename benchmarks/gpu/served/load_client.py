"""``python -m benchmarks.gpu.served.load_client``: closed loops of requests, a program that stays up.

A line of JSON on stdin asks for one: ``{"port", "seconds", "files"}``, each file a ModelInferRequest with a
connection and a thread of its own. Once all have been answered once, ``{"answered": true}`` goes to stdout;
after a line ``go`` each is sent again as soon as it is answered, until the time is over, and what was seen
follows in one line. A call that fails is answered by ``{"problem"}``. The end of stdin ends the program.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import grpc

_METHOD: Final = "/inference.GRPCInferenceService/ModelInfer"
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a connection each
)
_TIMEOUT_S: Final = 60.0


class Loop(threading.Thread):
    """One request, again and again, until the time is over. ``gate`` is passed when it is answered, and
    when all are to go.
    """

    def __init__(self, port: int, message: bytes, seconds: float, gate: threading.Barrier) -> None:
        super().__init__()
        self._port, self._message, self._seconds, self._gate = port, message, seconds, gate
        self.latencies_s: list[float] = []
        self.took_s = 0.0
        self.problem: str | None = None

    def run(self) -> None:
        try:
            with grpc.insecure_channel(f"127.0.0.1:{self._port}", options=_OPTIONS) as channel:
                self._loop(channel)
        except grpc.RpcError as error:
            self.problem = f"{error.code().name}: {error.details()}"
            self._gate.abort()
        except threading.BrokenBarrierError:
            pass  # another one failed

    def _loop(self, channel: grpc.Channel) -> None:
        call = channel.unary_unary(_METHOD)
        call(self._message, timeout=_TIMEOUT_S)
        self._gate.wait()
        self._gate.wait()
        now = began_at = time.perf_counter()
        while now - began_at < self._seconds:
            call(self._message, timeout=_TIMEOUT_S)
            ended_at = time.perf_counter()
            self.latencies_s.append(ended_at - now)
            now = ended_at
        self.took_s = now - began_at


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        contents = {file: Path(file).read_bytes() for file in asked["files"]}
        _tell(_seen(asked["port"], asked["seconds"], [contents[file] for file in asked["files"]]))


def _seen(port: int, seconds: float, messages: Sequence[bytes]) -> dict[str, Any]:
    gate = threading.Barrier(len(messages) + 1)
    loops = [Loop(port, message, seconds, gate) for message in messages]
    for loop in loops:
        loop.start()
    used_s = 0.0
    try:
        gate.wait()
        _tell({"answered": True})
        sys.stdin.readline()
        used_s = -time.process_time()
        gate.wait()
    except threading.BrokenBarrierError:
        pass  # a loop has the problem
    for loop in loops:
        loop.join()
    used_s += time.process_time()
    if problems := [loop.problem for loop in loops if loop.problem]:
        return {"problem": problems[0]}
    return {
        "answers_per_s": sum(len(loop.latencies_s) / loop.took_s for loop in loops),
        "latencies_s": [s for loop in loops for s in loop.latencies_s],
        "busy": used_s / max(loop.took_s for loop in loops),
    }


def _tell(told: dict[str, Any]) -> None:
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
