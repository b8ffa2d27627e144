"""What goes wrong on a device while a server uses it: each time the request in question gets an answer or a
clear error, and the next one is served. At the end the server leaves no memory of the device behind.
"""

from __future__ import annotations

import importlib
import os
import signal
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final

import grpc
import numpy as np

from benchmarks.gpu.running.section import Findings, SectionFailed, Site
from benchmarks.gpu.served.client import (
    Caller,
    InRegion,
    answer_array,
    calling,
    device_region,
    host_region,
    in_regions,
    status_text,
    used_nbytes,
    with_bytes,
)
from benchmarks.gpu.served.serving import Model, serving, tensor
from benchmarks.servers.server import RunningServer

_FAULTY, _HUNGRY, _SLOW = "faulty", "hungry", "slow"
_SLOW_S: Final = 0.5
#: For a worker's successor to be there; it imports what the first one did.
_SUCCESSOR_S: Final = 30.0
_RETRY_S: Final = 0.1
_COPIED_NBYTES: Final = 64 << 20
#: What a driver may keep to itself after the last process has ended.
_SLACK_NBYTES: Final = 64 << 20


def run(site: Site, findings: Findings) -> None:
    # This process is a client with memory of the device, whose own context is not to be counted.
    runtime = importlib.import_module("cupy").cuda.runtime
    runtime.free(runtime.malloc(1))
    before_nbytes = used_nbytes()
    with serving(site, "faults", _models()) as one, calling(one) as caller:
        for name, case in _CASES.items():
            try:
                seen = case(site, one, caller)
            except (SectionFailed, grpc.RpcError) as error:
                text = str(error) if isinstance(error, SectionFailed) else status_text(error)
                findings.check(name, False, text)
            else:
                findings.check(name, True, seen)
    deadline = time.monotonic() + 5  # a driver takes a moment to clear away after a process
    while (left_nbytes := used_nbytes() - before_nbytes) > _SLACK_NBYTES and time.monotonic() < deadline:
        time.sleep(_RETRY_S)
    findings.check(
        "memory of the device after the server's end",
        left_nbytes <= _SLACK_NBYTES,
        f"{left_nbytes / (1 << 20):+.1f} MiB against before its start",
    )


def _models() -> list[Model]:
    x, y, pid = tensor("x", "float32", -1), tensor("y", "float32", -1), tensor("pid", "int32", 1)
    once = {"retry_on_worker_death": False}
    delay = {"batching": {"max_queue_delay_us": 50_000}}
    return [
        _model("Faulty", _FAULTY, [x], [y, pid], max_batch_size=4, settings=once),
        _model("Hungry", _HUNGRY, [x], [y], max_batch_size=2, settings=delay),
        _model("Echo", _SLOW, [x], [y], kwargs={"seconds": _SLOW_S}),
    ]


def _model(callable_: str, name: str, inputs: Any, outputs: Any, **more: Any) -> Model:
    return Model(name, f"device_models.py:{callable_}", inputs, outputs, array="cupy", **more)


def _killed(site: Site, one: RunningServer, caller: Caller) -> str:
    """kill -9 while a request's tensors are copied."""
    nbytes = min(_COPIED_NBYTES, site.effort.largest_nbytes)
    before = _pid(caller)
    with ExitStack() as stack:
        given, answered = (stack.enter_context(host_region(caller, nbytes)) for _ in range(2))
        shape = (1, nbytes // 4)
        given.write(np.zeros(shape, np.float32))
        inputs = {"x": InRegion(given.name, shape, "float32")}
        message = in_regions(_FAULTY, inputs, {"y": InRegion(answered.name, shape, "float32")})
        futures = [caller.start(message) for _ in range(8)]
        futures[0].result()  # the others are under way
        os.kill(before, signal.SIGKILL)
        fates = [_fate(future) for future in futures[1:]]
    after = _await_successor(caller, before)
    return f"of the requests under way: {', '.join(fates)}; process {before} was replaced by {after}"


def _illegal_access(_site: Site, _one: RunningServer, caller: Caller) -> str:
    """A kernel reads where no memory is."""
    before = _pid(caller)
    failure = caller.failure(_command(1))
    if failure is None:
        raise SectionFailed("an illegal access of the callable was answered as if nothing had happened")
    after = _await_successor(caller, before)
    return f"{failure}; process {before} was replaced by {after}"


def _too_much_memory(_site: Site, _one: RunningServer, caller: Caller) -> str:
    before = _pid(caller)
    failure = caller.failure(_command(2))
    if failure is None or not failure.startswith("RESOURCE_EXHAUSTED"):
        raise SectionFailed(f"expected RESOURCE_EXHAUSTED, seen: {failure}")
    if (after := _pid(caller)) != before:
        raise SectionFailed(f"process {before} was replaced by {after} although its device was usable")
    return failure


def _halves(_site: Site, one: RunningServer, caller: Caller) -> str:
    """A batch of two for which there is no memory, where there is enough for one."""
    x = np.arange(4, dtype=np.float32)[None]
    message = with_bytes(_HUNGRY, {"x": x})
    futures = [caller.start(message) for _ in range(6)]  # they wait a little, and become batches
    answers = [answer_array(future.result(), "y", "float32") for future in futures]
    if not all(np.array_equal(answer, x) for answer in answers):
        raise SectionFailed("an answer of a batch that was run in halves is wrong")
    with urllib.request.urlopen(f"http://127.0.0.1:{one.ports.metrics}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    start = "gpuserve_oom_splits_total{"
    of_model = (line for line in lines if line.startswith(start) and f'model="{_HUNGRY}"' in line)
    if not (splits := sum(float(line.rpartition(" ")[2]) for line in of_model)):
        raise SectionFailed("no batch was run in halves: the requests were too far apart")
    return f"{splits:.0f} batches were run in halves, every request was answered"


def _unregistered_in_use(_site: Site, _one: RunningServer, caller: Caller) -> str:
    """A region of the device is unregistered while a request uses it."""
    from tritonclient.grpc import service_pb2

    x = np.arange(1024, dtype=np.float32)
    with device_region(caller, x.nbytes) as given, device_region(caller, x.nbytes) as answered:
        given.write(x)
        inputs = {"x": InRegion(given.name, x.shape, "float32")}
        message = in_regions(_SLOW, inputs, {"y": InRegion(answered.name, x.shape, "float32")})
        future = caller.start(message)
        time.sleep(_SLOW_S / 2)  # long enough to be in the callable; not a condition of what follows
        request = service_pb2.CudaSharedMemoryUnregisterRequest(name=given.name)
        try:
            caller.call("CudaSharedMemoryUnregister", request.SerializeToString())
            told = "unregistered"
        except grpc.RpcError as error:
            told = f"refused ({status_text(error)})"
        fate = _fate(future)
        if told == "unregistered" and caller.failure(message) is None:
            raise SectionFailed("a request named a region that had been unregistered, and was answered")
    _pid(caller)
    return f"{told}; the request: {fate}"


_Case = Callable[[Site, RunningServer, Caller], str]
_CASES: Final[dict[str, _Case]] = {
    "a worker is killed in the middle of copies": _killed,
    "a kernel makes an illegal access": _illegal_access,
    "a callable asks for too much memory": _too_much_memory,
    "a batch is too large for the memory": _halves,
    "a region is unregistered while in use": _unregistered_in_use,
}


def _command(what: int) -> bytes:
    return with_bytes(_FAULTY, {"x": np.full((1, 4), what, np.float32)})


def _pid(caller: Caller, timeout_s: float = _SUCCESSOR_S) -> int:
    """The process that answers a plain request, which is checked."""
    answer = caller.infer(_command(0), timeout_s)
    if not np.array_equal(answer_array(answer, "y", "float32"), np.ones((1, 4), np.float32)):
        raise SectionFailed("a plain request was answered wrong")
    return int(answer_array(answer, "pid", "int32").item())


def _await_successor(caller: Caller, before: int) -> int:
    """The process that answers once another one does. Raises SectionFailed: none does in time."""
    deadline = time.monotonic() + _SUCCESSOR_S
    while time.monotonic() < deadline:
        try:
            after = _pid(caller, max(0.1, deadline - time.monotonic()))
        except grpc.RpcError:
            after = before
        if after != before:
            return after
        time.sleep(_RETRY_S)
    raise SectionFailed(f"process {before} had no successor that answers after {_SUCCESSOR_S:.0f} s")


def _fate(future: Any) -> str:
    try:
        future.result()
    except grpc.RpcError as error:
        return status_text(error)
    return "answered"
