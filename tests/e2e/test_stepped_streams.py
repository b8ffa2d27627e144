"""10,000 streams of stepped callables that come and go leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import os
import random
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from commands import ask
from config_file import served
from exploring import variants
from processes import command_line, descendants, wait_until
from serving import Addresses
from tritonclient.grpc import service_pb2, service_pb2_grpc

STEPPED = Path(__file__).resolve().parents[1] / "models" / "stepped.py"
MODELS = ("narrow", "wide")
N_STREAMS, N_AT_ONCE, N_WARM = 10_000, 96, 1_000
ENDLESS = 1_000_000
#: The heap of a process may keep 32 MiB of unused memory. Streams that leave 5 KiB each exceed this.
MOST_GROWTH_NBYTES = 40 << 20
TIMEOUT_S = 30.0
pytestmark = pytest.mark.thorough


@pytest.fixture(params=variants(1, 2))
def server(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Addresses]:
    # A full garbage collection after thousands of streams takes 60 to 80 ms on a busy machine.
    monkeypatch.setenv("GPUSERVE_TURN_LIMIT_MS", "200")
    target = f"{STEPPED}:Numbered"
    models: list[dict[str, Any]] = [
        {"name": one, "callable": target, "kwargs": {"record": str(tmp_path / one), "width": width}}
        for one, width in zip(MODELS, (1, 20_000), strict=True)
    ]
    with served(tmp_path, models, ingress_processes=request.param) as addresses:
        yield addresses


class Clients:
    """Streams that end in every way. ``ends`` counts how."""

    def __init__(self, addresses: Addresses, channel: grpc.aio.Channel) -> None:
        self._http = addresses.http.split(":")
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        self._random = random.Random(5)
        self._at_once = asyncio.Semaphore(N_AT_ONCE)
        self.ends: Counter[str] = Counter()

    async def run(self, count: int) -> None:
        kinds = [self._read, self._read, self._cancel, self._expire, self._read_events, self._leave]
        async with asyncio.TaskGroup() as tasks:
            for number in range(count):
                # Few slow readers: each holds some MiB until it leaves.
                made = self._do_not_read if number % 50 == 0 else self._random.choice(kinds)
                await self._at_once.acquire()
                tasks.create_task(made()).add_done_callback(lambda _: self._at_once.release())

    def _count(self) -> int:
        return self._random.randrange(1, 9)

    def _call(self, n: int, timeout_us: int = 0) -> Any:
        async def requests() -> Any:
            tensor = service_pb2.ModelInferRequest.InferInputTensor(name="n", datatype="INT32", shape=[1])
            data = np.array([n], np.int32).tobytes()
            request = service_pb2.ModelInferRequest(
                model_name="narrow", inputs=[tensor], raw_input_contents=[data]
            )
            if timeout_us:
                request.parameters["timeout"].int64_param = timeout_us
            yield request

        return self._stub.ModelStreamInfer(requests())

    async def _read(self) -> None:
        n = self._count()
        values = []
        async for one in self._call(n):
            assert not one.error_message
            values += np.frombuffer(one.infer_response.raw_output_contents[0], np.int32).tolist()
        assert values == list(range(1, n + 1))
        self.ends["read"] += 1

    async def _cancel(self) -> None:
        call, n = self._call(ENDLESS), self._count() - 1
        for _ in range(n):  # with 0 it may not have been admitted yet
            assert (await call.read()).infer_response.raw_output_contents
        call.cancel()
        self.ends["cancelled"] += 1

    async def _expire(self) -> None:
        last = ""
        async for one in self._call(ENDLESS, 20_000):
            last = one.error_message
        assert "deadline" in last.lower()
        self.ends["expired"] += 1

    async def _open(self, model: str, n: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*self._http, limit=1 << 10)
        body = json.dumps({"n": n}).encode()
        path = f"/v2/models/{model}/generate_stream"
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        writer.write(head.encode() + body)
        return reader, writer

    async def _read_events(self) -> None:
        n = self._count()
        reader, writer = await self._open("narrow", n)
        assert (await reader.read(-1)).count(b"data: ") == n
        writer.close()
        self.ends["read"] += 1

    async def _leave(self) -> None:
        reader, writer = await self._open("narrow", ENDLESS)
        if self._count() > 2:
            await reader.readuntil(b"data: ")
        writer.transport.abort()
        self.ends["left"] += 1

    async def _do_not_read(self) -> None:
        reader, writer = await self._open("wide", ENDLESS)
        await reader.readuntil(b"data: ")
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        for _ in range(5):
            await self._read()  # others are not delayed
        writer.transport.abort()
        self.ends["unread"] += 1


def metrics(addresses: Addresses, name: str) -> float:
    with urllib.request.urlopen(f"http://{addresses.metrics}/metrics", timeout=TIMEOUT_S) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def is_idle(addresses: Addresses, record: Path) -> bool:
    gauges = ("gpuserve_running_requests", "gpuserve_queue_requests", "gpuserve_arena_blocks")
    if any(metrics(addresses, name) for name in gauges):
        return False
    return all(len(one := events(record / model)) % 2 == 0 and set(one.values()) == {1} for model in MODELS)


def events(path: Path) -> Counter[tuple[str, ...]]:
    """Return how often each request was admitted and released."""
    found = Counter(tuple(line.split()) for line in path.read_text().splitlines())
    admitted = {one[1:] for one in found if one[0] == "admit"}
    assert {one[1:] for one in found if one[0] == "release"} <= admitted
    return found


def sizes() -> dict[int, tuple[int, int, int]]:
    """Return descriptors, threads and resident bytes of each process of the server."""
    found = {}
    for pid in descendants(os.getpid()):
        status = Path(f"/proc/{pid}/status").read_text()
        fields = dict(line.split(":\t", 1) for line in status.splitlines())
        n_descriptors = len(os.listdir(f"/proc/{pid}/fd"))
        found[pid] = n_descriptors, int(fields["Threads"]), int(fields["VmRSS"].split()[0]) << 10
    return found


def grown(before: dict[int, tuple[int, int, int]]) -> Iterator[str]:
    """Yield a line for each process that has more than before."""
    after = sizes()
    if after.keys() != before.keys():
        yield f"other processes: {before.keys() ^ after.keys()}"
    for pid in before.keys() & after.keys():
        extra = [now - then for now, then in zip(after[pid], before[pid], strict=True)]
        # Pools of threads grow up to their size.
        if extra[0] > 2 or extra[1] > 6 or extra[2] > MOST_GROWTH_NBYTES:
            yield f"{command_line(pid)} has {after[pid]}, {extra} more than before"


def test_streams_that_come_and_go_leave_nothing_behind(server: Addresses, tmp_path: Path) -> None:
    async def run(clients: Clients, count: int) -> None:
        await asyncio.wait_for(clients.run(count), 10 * TIMEOUT_S)

    async def both() -> tuple[Any, Counter[str]]:
        async with grpc.aio.insecure_channel(server.grpc) as channel:
            clients = Clients(server, channel)
            await run(clients, N_WARM)
            await asyncio.to_thread(wait_until, lambda: is_idle(server, tmp_path), "the server is idle")
            ask(server.http, "events")  # which opens sockets that would count as left behind
            before = sizes()
            await run(clients, N_STREAMS - N_WARM)
            await asyncio.to_thread(wait_until, lambda: is_idle(server, tmp_path), "the server is idle")
            return before, clients.ends

    before, ends = asyncio.run(both())
    n_extra = 5 * ends["unread"]
    assert sum(ends.values()) == N_STREAMS + n_extra
    assert min(ends.values()) > N_STREAMS // 60
    try:  # unused memory of the heap is released within seconds
        wait_until(lambda: not list(grown(before)), "nothing has grown", TIMEOUT_S)
    except AssertionError:
        pytest.fail("\n".join(grown(before)))
    n_admitted = sum(len(events(tmp_path / one)) for one in MODELS) // 2
    assert n_admitted >= ends["read"] + ends["unread"]
