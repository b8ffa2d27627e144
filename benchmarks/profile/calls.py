"""``python -m benchmarks.profile.calls [--by-function]``: Python calls in the front for a small request.

A server with a real worker is asked for 64 bytes again and again over one connection, one request in flight.
Its front counts the calls of Python functions by ``sys.setprofile``; SIGUSR1 begins and ends that. Calls do
not depend on what else the machine does. They are counted for gRPC requests: plain, behind an access rule,
with another model traced, with one in a thousand and with every request traced, with a header forwarded, and
where responses may be compressed; for messages in one gRPC stream; for HTTP requests with binary tensors; and
for a model without batching, of which so many are asked at once.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import queue
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
from tritonclient.grpc import service_pb2 as pb

from benchmarks.payloads import INFER, STREAM_INFER, EchoPayload, unbatched
from benchmarks.processes import tree
from benchmarks.servers import ConfiguredGpuServe, echo_entry, running
from benchmarks.servers.server import ECHO, ECHO_UNBATCHED, Api

SMALL: Final = EchoPayload(64)
REQUESTS: Final = 320
WARM_UP: Final = 96
#: Requests for the model without batching that are in flight together.
AT_ONCE: Final = 32
ANSWER_TIMEOUT_S: Final = 60.0
SETTING: Final = "/inference.GRPCInferenceService/TraceSetting"
_COUNTER: Final = """
import collections, json, os, signal, sys
if "gpuserve.front.process" in sys.orig_argv:
    counts = collections.Counter()
    def count(frame, event, arg):
        if event == "call":
            counts[frame.f_code] += 1
    def switch(signum, frame):
        if sys.getprofile() is None:
            counts.clear()
            sys.setprofile(count)
            return
        sys.setprofile(None)
        named = collections.Counter()
        for code, n in counts.items():
            named[f"{code.co_filename}:{code.co_qualname}"] += n
        path = os.environ["CALLS_FILE"]
        with open(path + ".part", "w") as file:
            json.dump(named, file)
        os.rename(path + ".part", path)
    signal.signal(signal.SIGUSR1, switch)
"""
#: By name: settings of the server, headers of the requests, and the model that clients have traced, if any.
VARIANTS: Final[dict[str, tuple[dict[str, Any], tuple[tuple[str, str], ...], str]]] = {
    "plain": ({}, (), ""),
    "behind an access rule": (
        {"access_rules": [{"groups": ["inference"], "header": "token", "token": "right"}]},
        (("token", "right"),),
        "",
    ),
    "another model traced": ({"trace": {"rate": 1}}, (), "other"),
    "one in 1,000 traced": ({"trace": {"rate": 1000}}, (), "echo"),
    "traced": ({"trace": {"rate": 1}}, (), "echo"),
    "a header forwarded": ({"grpc_header_forward_pattern": "x-"}, (("x-tenant", "a"),), ""),
    "response compression": ({"grpc_response_compression": "low"}, (), ""),
}


class _CountingServer(ConfiguredGpuServe):
    """This server, whose front counts calls into the file ``calls``."""

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        (folder / "sitecustomize.py").write_text(_COUNTER)
        models = [echo_entry("model.py:echo", name) for name in (ECHO, "other")]
        models.append({**echo_entry("model.py:echo_one", ECHO_UNBATCHED), "max_batch_size": 0})
        if trace := settings.get("trace"):
            settings = {**settings, "trace": {**trace, "file": str(folder / "trace.json")}}
        super().__init__(folder, models, settings)
        self._folder = folder
        self.calls = folder / "calls.json"

    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(self._folder), *filter(None, [os.environ.get("PYTHONPATH")])])
        return {**super().environment(), "PYTHONPATH": path, "CALLS_FILE": str(self.calls)}


Ask = Callable[[], object]


def asking_grpc(headers: tuple[tuple[str, str], ...], traced: str, address: str, stack: ExitStack) -> Ask:
    """One call of ModelInfer at a time, after the model ``traced``, if any, is traced."""
    channel = stack.enter_context(grpc.insecure_channel(address, [("grpc.http2.bdp_probe", 0)]))
    if traced:
        setting = pb.TraceSettingRequest(model_name=traced)
        setting.settings["trace_level"].value.append("TIMESTAMPS")
        channel.unary_unary(SETTING)(setting.SerializeToString())
    infer, body = channel.unary_unary(INFER), SMALL.grpc_message()
    return lambda: infer(body, metadata=headers)


def asking_in_stream(address: str, stack: ExitStack) -> Ask:
    """One message at a time in one call of ModelStreamInfer."""
    channel = stack.enter_context(grpc.insecure_channel(address, [("grpc.http2.bdp_probe", 0)]))
    sent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    stack.callback(sent.put, None)
    answers = channel.stream_stream(STREAM_INFER)(iter(sent.get, None))
    body = SMALL.grpc_message()

    def ask() -> object:
        sent.put(body)
        return next(answers)

    return ask


def asking_unbatched(address: str, stack: ExitStack) -> Ask:
    """``AT_ONCE`` calls of ModelInfer for a model without batching: each last one asks, and waits for all."""
    channel = stack.enter_context(grpc.insecure_channel(address, [("grpc.http2.bdp_probe", 0)]))
    infer, body = channel.unary_unary(INFER), unbatched(64).grpc_message()
    asked: list[Any] = []

    def ask() -> object:
        asked.append(infer.future(body))
        if len(asked) == AT_ONCE:
            answers = [one.result() for one in asked]
            asked.clear()
            return answers
        return None

    return ask


def asking_http(address: str, stack: ExitStack) -> Ask:
    """One POST at a time with a binary tensor, which either port takes."""
    connection = http.client.HTTPConnection(address)
    stack.callback(connection.close)
    request = SMALL.http_request(Api.HTTP_BINARY)

    def ask() -> bytes:
        connection.request("POST", *request)
        answer = connection.getresponse()
        assert answer.status == http.client.OK
        return answer.read()

    return ask


def counted(settings: dict[str, Any], asking: Callable[[str, ExitStack], Ask]) -> Counter[str]:
    """How often each function of the front is called, over all requests."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        server = _CountingServer(Path(name), settings)
        server.prepare()
        one = stack.enter_context(running(server, Path(name), (ECHO, "other", ECHO_UNBATCHED)))
        (front,) = (each.pid for each in tree(one.pid) if server.role(each.command) == "front")
        ask = asking(f"127.0.0.1:{one.ports.grpc}", stack)
        for _ in range(WARM_UP):
            ask()
        os.kill(front, signal.SIGUSR1)
        time.sleep(0.2)
        for _ in range(REQUESTS):
            ask()
        os.kill(front, signal.SIGUSR1)
        return Counter(_read_once(server.calls))


def _read_once(path: Path) -> dict[str, int]:
    deadline = time.monotonic() + ANSWER_TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < deadline, "the front does not say what it has counted"
        time.sleep(0.01)
    found: dict[str, int] = json.loads(path.read_text())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile.calls")
    parser.add_argument("--by-function", action="store_true", help="print every function, too")
    by_function = parser.parse_args().by_function
    ways: dict[str, tuple[dict[str, Any], Callable[[str, ExitStack], Ask]]] = {
        name: (settings, partial(asking_grpc, headers, traced))
        for name, (settings, headers, traced) in VARIANTS.items()
    }
    ways |= {"in one stream": ({}, asking_in_stream), "HTTP": ({}, asking_http)}
    ways["unbatched, several at once"] = ({}, asking_unbatched)
    for name, way in ways.items():
        counts = counted(*way)
        print(f"{name}: {counts.total() / REQUESTS:.1f} calls a request")
        if by_function:
            for function, n in counts.most_common():
                if n * 20 >= REQUESTS:
                    print(f"  {n / REQUESTS:6.2f}  {function.rpartition('gpuserve/')[2]}")


if __name__ == "__main__":
    main()
