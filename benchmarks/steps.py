"""Continuous batching: synthetic steps whose requests join and leave, beside static batches and a bare loop.

Lengths are 10 to 500 responses. The load comes from ``gpuserve bench``; requests that join and are cancelled
come from this process, one after the other.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import json
import os
import queue
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import numpy as np

from benchmarks.extra_rows import OwnModels, RepositoryGpuServe
from benchmarks.figures import Figure, Goal, cells, document, percentile, table
from benchmarks.models.steps import RECORD, bare_loop
from benchmarks.report import Part, Plan, Section
from benchmarks.servers import GpuServe, LitServe, PlainTriton
from benchmarks.servers.server import RunningServer, ServerFailed, running

STEPPED, STEPPED_256, STATIC, ITERATES = "stepped", "stepped-256", "static", "iterates"
_LENGTHS: Final = random.Random(7).choices(range(10, 501), k=997)
_WARM_UP_S: Final = 2.5  # longer than the longest request
_LEAST_S: Final = 6.0  # some static batches end
_PROBES: Final = 100
_PROBE_S: Final = 20.0
_ENDLESS: Final = 1_000_000


class StepsGpuServe(OwnModels):
    config = "steps.yaml"
    models = frozenset({STEPPED, STEPPED_256, STATIC})
    record = ""

    def environment(self) -> dict[str, str]:
        return {**super().environment(), RECORD: self.record}


class IterativeGpuServe(RepositoryGpuServe):
    models = frozenset({ITERATES})


class IterativeTriton(PlainTriton):
    models = frozenset({ITERATES})


class StepsLitServe(LitServe):
    models = frozenset({STEPPED})
    program = "litserve_steps.py"


class Steps(Section):
    names = (
        *("steps-useful", "steps-overhead-64", "steps-overhead-256", "steps-join", "steps-cancel"),
        *("steps-iterative", "steps-litserve"),
    )
    is_default = False

    def measure(self, plan: Plan) -> StepsPart | None:
        servers = [StepsGpuServe(one.cache) for one in plan.servers if isinstance(one, GpuServe)]
        chosen = [name for name in self.names if name in plan.names]
        if not (servers and chosen):
            return None
        samples: dict[str, list[float]] = {}
        failures: dict[str, str] = {}
        for _ in range(plan.rounds):
            try:
                for case, value in itertools.chain(
                    _round(servers[0], plan, frozenset(chosen)),
                    _iterative(plan) if "steps-iterative" in chosen else (),
                    _beside_litserve(plan) if "steps-litserve" in chosen else (),
                ):
                    plan.say(f"{case}: {value:.4g}")
                    samples.setdefault(case, []).append(value)
            except ServerFailed as error:
                failures["steps"] = str(error)
                break
        return StepsPart([_figure(case, found) for case, found in samples.items()], failures)


_GOALS: Final[dict[str, tuple[str, Goal | None]]] = {
    "stepped, 128 clients": ("responses/s", None),
    "static batches, 128 clients": ("responses/s", None),
    "bare loop": ("responses/s", None),
    "stepped to static batches": ("ratio", Goal(1.9, at_least=True)),
    "stepped to bare loop": ("ratio", Goal(0.97, at_least=True)),
    "between two steps of 64": ("µs", Goal(50)),
    "between two steps of 256": ("µs", Goal(150)),
    "steps from arrival to the first own step, p99": ("steps", Goal(1)),
    "steps from a cancellation to the release, p99": ("steps", Goal(1)),
    "iterative sequences, 128 clients": ("responses/s", None),
    "Triton's iterative sequences": ("responses/s", None),
    "iterative sequences to Triton's": ("ratio", Goal(3, at_least=True)),
    "stepped over HTTP, 128 clients": ("responses/s", None),
    "LitServe's continuous batching loop": ("responses/s", None),
    "stepped to LitServe's loop": ("ratio", Goal(3, at_least=True)),
}


def _figure(case: str, samples: Sequence[float]) -> Figure:
    unit, goal = _GOALS[case]
    return Figure(case, unit, tuple(samples), goal)


def _round(server: StepsGpuServe, plan: Plan, names: frozenset[str]) -> Iterator[tuple[str, float]]:
    """Yield the cases of one round with their values."""
    seconds = max(plan.seconds, _LEAST_S)
    if names & {"steps-useful", "steps-overhead-64"}:
        with _recorded(server, plan) as (one, record):
            stepped = _responses_per_s(one, STEPPED, 128, seconds)
        if "steps-useful" in names:
            with _recorded(server, plan) as (one, _):
                static = _responses_per_s(one, STATIC, 128, seconds)
            bare = bare_loop(_LENGTHS, 64, seconds)
            yield from zip(_GOALS, (stepped, static, bare, stepped / static, stepped / bare), strict=False)
        if "steps-overhead-64" in names:
            yield "between two steps of 64", overhead_us(record, 64)
    if "steps-overhead-256" in names:
        with _recorded(server, plan) as (one, record):
            _responses_per_s(one, STEPPED_256, 300, seconds)
        yield "between two steps of 256", overhead_us(record, 256)
    if names & {"steps-join", "steps-cancel"}:
        with _recorded(server, plan) as (one, record), _load(one, STEPPED, 32, _PROBE_S):
            time.sleep(_WARM_UP_S)
            cancelled = [_probe(one) for _ in range(_PROBES)]
        starts = [start for start, *_ in record["steps"]]
        joins = [sum(sent < one < first for one in starts) for sent, first in record["joins"]]
        if "steps-join" in names:
            yield "steps from arrival to the first own step, p99", percentile(joins, 99)
        released = dict(map(tuple, record["releases"]))
        late = [sum(at < one < released[sent] for one in starts) for sent, at in cancelled]
        if "steps-cancel" in names:
            yield "steps from a cancellation to the release, p99", percentile(late, 99)


def _iterative(plan: Plan) -> Iterator[tuple[str, float]]:
    """Yield the rates of one model.py that reschedules its requests, on this server and on Triton."""
    rates = []
    for chosen in plan.servers:
        if isinstance(chosen, GpuServe | PlainTriton):
            made = IterativeGpuServe if isinstance(chosen, GpuServe) else IterativeTriton
            with running(made(chosen.cache), plan.logs, (ITERATES,)) as one:
                rates.append(_responses_per_s(one, ITERATES, 128, max(plan.seconds, _LEAST_S)))
            case = (
                "iterative sequences, 128 clients"
                if made is IterativeGpuServe
                else "Triton's iterative sequences"
            )
            yield case, rates[-1]
    if len(rates) == 2:
        yield "iterative sequences to Triton's", rates[0] / rates[1]


def _beside_litserve(plan: Plan) -> Iterator[tuple[str, float]]:
    """Yield the rates of this server and of LitServe, as a client of both counts responses."""
    rates = []
    for chosen in plan.servers:
        if isinstance(chosen, GpuServe | LitServe):
            is_ours = isinstance(chosen, GpuServe)
            made = (StepsGpuServe if is_ours else StepsLitServe)(chosen.cache)
            path = f"/v2/models/{STEPPED}/generate_stream" if is_ours else "/predict"
            with running(made, plan.logs, (STEPPED,)) as one:
                rates.append(asyncio.run(_streamed_per_s(one.ports.http, path, max(plan.seconds, _LEAST_S))))
            case = "stepped over HTTP, 128 clients" if is_ours else "LitServe's continuous batching loop"
            yield case, rates[-1]
    if len(rates) == 2:
        yield "stepped to LitServe's loop", rates[0] / rates[1]


async def _streamed_per_s(port: int, path: str, seconds: float) -> float:
    """Return the responses a second to 128 clients, each of which reads one stream after the other."""
    lengths, count = itertools.cycle(_LENGTHS), 0

    async def read_streams() -> None:
        nonlocal count
        while True:
            body = json.dumps({"n": next(lengths)})
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n{body}".encode())
            while data := await reader.read(1 << 16):
                count += data.count(b'"left"')
            writer.close()

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(read_streams()) for _ in range(128)]
        await asyncio.sleep(_WARM_UP_S)
        before, began = count, time.monotonic()
        await asyncio.sleep(seconds)
        rate = (count - before) / (time.monotonic() - began)
        for one in tasks:
            one.cancel()
    return rate


@contextmanager
def _recorded(server: StepsGpuServe, plan: Plan) -> Iterator[tuple[RunningServer, dict[str, Any]]]:
    """Run the server; afterwards the record has what its stepped model has seen."""
    record: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        server.record = os.path.join(folder, "record.json")
        with running(server, plan.logs, tuple(server.models)) as one:
            yield one, record
        record |= json.loads(Path(server.record).read_text())


def _responses_per_s(one: RunningServer, model: str, concurrency: int, seconds: float) -> float:
    with _load(one, model, concurrency, seconds) as report:
        pass
    (level,) = report["levels"]
    if level["failures"]:
        raise ServerFailed(f"{model}: requests failed: {level['failures']}")
    return float(level["responses_per_s"])


@contextmanager
def _load(one: RunningServer, model: str, concurrency: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Keep so many requests in flight during the block, and until the time is over. Then the yielded report
    is filled.
    """
    report: dict[str, Any] = {}
    with TemporaryDirectory() as folder:
        data, output = Path(folder, "data.json"), Path(folder, "report.json")
        requests = [{"n": [[n]] if model in {STATIC, ITERATES} else [n]} for n in _LENGTHS]
        data.write_text(json.dumps({"data": requests}))
        load = ("--concurrency", str(concurrency), "--duration", str(seconds), "--warmup", str(_WARM_UP_S))
        command = [
            sys.executable,
            "-m",
            "gpuserve",
            "bench",
            model,
            "--url",
            f"grpc://127.0.0.1:{one.ports.grpc}",
        ]
        command += [*load, "--processes", "1", "--data", str(data), "--output", str(output)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        try:
            yield report
            _, text = process.communicate(timeout=seconds + 60)
        finally:
            process.kill()
        if not output.exists():
            raise ServerFailed(f"gpuserve bench ended with {process.returncode}: {text}")
        report |= json.loads(output.read_text())


def _probe(one: RunningServer) -> tuple[float, float]:
    """Send an endless request, cancel it after some responses, and return when it was sent and cancelled."""
    from tritonclient import grpc

    responses: queue.Queue[Any] = queue.Queue()
    with grpc.InferenceServerClient(f"127.0.0.1:{one.ports.grpc}") as client:
        client.start_stream(lambda result, error: responses.put(error or result))
        length, sent = grpc.InferInput("n", [1], "INT32"), grpc.InferInput("sent", [1], "FP64")
        length.set_data_from_numpy(np.array([_ENDLESS], np.int32))
        now = time.monotonic()
        sent.set_data_from_numpy(np.array([now]))
        client.async_stream_infer(STEPPED, [length, sent])
        for _ in range(3):
            if isinstance(found := responses.get(timeout=30), Exception):
                raise ServerFailed(f"a request that is to be cancelled: {found}")
        cancelled = time.monotonic()
        client.stop_stream(cancel_requests=True)
    return now, cancelled


def overhead_us(record: Mapping[str, Any], active: int) -> float:
    """Return the median time between two steps with so many requests, of which none is new."""
    steps = record["steps"]
    found = [
        later[0] - before[1]
        for before, later in itertools.pairwise(steps)
        if before[2] == later[2] == active and not later[3]
    ]
    if not found:
        raise ServerFailed(f"no two steps in a row had {active} requests")
    return 1e6 * median(found)


@dataclass(frozen=True, slots=True)
class StepsPart(Part):
    figures: Sequence[Figure]
    failures: Mapping[str, str] = dataclasses.field(default_factory=dict)
    key = "steps"

    def markdown(self) -> str:
        lines = [cells(document(one)) for one in self.figures]
        return table(["Steps of 2 ms + 20 µs a row, lengths 10 to 500", "median", "goal", "reached"], lines)

    def document(self) -> list[dict[str, Any]]:
        return list(map(document, self.figures))
