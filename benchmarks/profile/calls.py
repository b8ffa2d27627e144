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
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import grpc
import yaml
from tritonclient.grpc import service_pb2 as pb

REQUESTS: Final = 320
WARM_UP: Final = 96
#: Requests for the model without batching that are in flight together.
AT_ONCE: Final = 32
START_TIMEOUT_S: Final = 60.0
INFER: Final = "/inference.GRPCInferenceService/ModelInfer"
STREAM: Final = "/inference.GRPCInferenceService/ModelStreamInfer"
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
_ECHO: Final = """
from gpuserve.decorators import batch


@batch
def echo(x):
    return [x]


def echo_one(requests):
    return [{"y": one["x"]} for one in requests]
"""
#: By name: settings of the server, headers of the requests, and the model that clients have traced, if any.
VARIANTS: Final[dict[str, tuple[dict[str, Any], tuple[tuple[str, str], ...], str]]] = {
    "plain": ({}, (), ""),
    "behind an access rule": (
        {"access_rules": [{"groups": ["inference"], "header": "token", "token": "right"}]},
        (("token", "right"),),
        "",
    ),
    "another model traced": ({"trace": {"file": "trace.json", "rate": 1}}, (), "other"),
    "one in 1,000 traced": ({"trace": {"file": "trace.json", "rate": 1000}}, (), "echo"),
    "traced": ({"trace": {"file": "trace.json", "rate": 1}}, (), "echo"),
    "a header forwarded": ({"grpc_header_forward_pattern": "x-"}, (("x-tenant", "a"),), ""),
    "response compression": ({"grpc_response_compression": "low"}, (), ""),
}


def message(model: str = "echo", shape: Sequence[int] = (1, 16)) -> bytes:
    request = pb.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=shape)
    request.raw_input_contents.append(bytes(64))
    encoded: bytes = request.SerializeToString()
    return encoded


@contextmanager
def serving(folder: Path, settings: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """The gRPC address of a server, and the process of its front."""
    (folder / "sitecustomize.py").write_text(_COUNTER)
    (folder / "model.py").write_text(_ECHO)
    tensor = {"dtype": "float32", "shape": [-1]}
    model = {"callable": "model.py:echo", "inputs": [{"name": "x", **tensor}], "max_batch_size": 64}
    models = [{"name": one, **model, "outputs": [{"name": "y", **tensor}]} for one in ("echo", "other")]
    models.append({**models[0], "name": "unbatched", "callable": "model.py:echo_one", "max_batch_size": 0})
    ports = {"host": "127.0.0.1", "http_port": None, "grpc_port": 0, "metrics_port": None}
    with (folder / "config.yaml").open("w") as file:
        yaml.safe_dump({"server": {**ports, **settings}, "models": models}, file)
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "CALLS_FILE": str(folder / "calls.json")}
    command = [sys.executable, "-m", "gpuserve", "serve", "config.yaml", "--log-format", "json"]
    log = (folder / "log").open("w+")
    server = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log)
    try:
        yield _address(folder / "log", server), _front_of(server.pid)
    finally:
        server.send_signal(signal.SIGINT)
        server.wait()
        log.close()


Ask = Callable[[], object]


def asking_grpc(headers: tuple[tuple[str, str], ...], traced: str, address: str, stack: ExitStack) -> Ask:
    """One call of ModelInfer at a time, after the model ``traced``, if any, is traced."""
    channel = stack.enter_context(grpc.insecure_channel(address, [("grpc.http2.bdp_probe", 0)]))
    if traced:
        setting = pb.TraceSettingRequest(model_name=traced)
        setting.settings["trace_level"].value.append("TIMESTAMPS")
        channel.unary_unary(SETTING)(setting.SerializeToString())
    infer, body = channel.unary_unary(INFER), message()
    return lambda: infer(body, metadata=headers)


def asking_in_stream(address: str, stack: ExitStack) -> Ask:
    """One message at a time in one call of ModelStreamInfer."""
    channel = stack.enter_context(grpc.insecure_channel(address, [("grpc.http2.bdp_probe", 0)]))
    sent: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    stack.callback(sent.put, None)
    answers = channel.stream_stream(STREAM)(iter(sent.get, None))
    body = message()

    def ask() -> object:
        sent.put(body)
        return next(answers)

    return ask


def asking_unbatched(address: str, stack: ExitStack) -> Ask:
    """``AT_ONCE`` calls of ModelInfer for a model without batching: each last one asks, and waits for all."""
    channel = stack.enter_context(grpc.insecure_channel(address, [("grpc.http2.bdp_probe", 0)]))
    infer, body = channel.unary_unary(INFER), message("unbatched", [16])
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
    entry = {"name": "x", "datatype": "FP32", "shape": [1, 16], "parameters": {"binary_data_size": 64}}
    head = json.dumps({"inputs": [entry], "parameters": {"binary_data_output": True}}).encode()
    headers = {"Inference-Header-Content-Length": str(len(head))}

    def ask() -> bytes:
        connection.request("POST", "/v2/models/echo/infer", head + bytes(64), headers)
        answer = connection.getresponse()
        assert answer.status == http.client.OK
        return answer.read()

    return ask


def counted(settings: dict[str, Any], asking: Callable[[str, ExitStack], Ask]) -> Counter[str]:
    """How often each function of the front is called, over all requests."""
    with (
        tempfile.TemporaryDirectory() as name,
        serving(Path(name), settings) as (address, front),
        ExitStack() as stack,
    ):
        ask = asking(address, stack)
        for _ in range(WARM_UP):
            ask()
        os.kill(front, signal.SIGUSR1)
        time.sleep(0.2)
        for _ in range(REQUESTS):
            ask()
        os.kill(front, signal.SIGUSR1)
        return Counter(_read_once(Path(name) / "calls.json"))


def _read_once(path: Path) -> dict[str, int]:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not path.exists():
        assert time.monotonic() < deadline, "the front does not say what it has counted"
        time.sleep(0.01)
    found: dict[str, int] = json.loads(path.read_text())
    return found


def _address(log: Path, server: subprocess.Popen[bytes]) -> str:
    deadline = time.monotonic() + START_TIMEOUT_S
    while "ready: " not in (text := log.read_text()):
        assert server.poll() is None, text
        assert time.monotonic() < deadline, text
        time.sleep(0.05)
    return text.partition("gRPC ")[2].split('"')[0].split(",")[0]


def _front_of(supervisor: int) -> int:
    """The child of the supervisor that runs the module of the front."""
    for pid in Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split():
        if b"gpuserve.front.process" in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return int(pid)
    raise RuntimeError("the server has no front")


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
