"""Sections of requests that differ in length: a model of 5 ms a batch, asked over HTTP by 64 connections. Its
batches hold one length, or any lengths if its input is ragged.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Final

from benchmarks.figures import Goal
from benchmarks.load import LoadResult, MixedHttpLoad
from benchmarks.payloads import LengthsPayload, post
from benchmarks.report import Plan
from benchmarks.request_section import Requests
from benchmarks.rows import Goals, Measure, Row
from benchmarks.servers import GpuServe, Mosec, PlainTriton
from benchmarks.servers.server import MODELS_FOLDER, Api, Ports, RunningServer, Server
from benchmarks.sleeping_models import DeployedGpuServe, DeployedTriton, SleepingModel, write_repository

_BATCH_S: Final = 0.005
_PLAIN = SleepingModel("lengths", _BATCH_S, max_batch_size=64)
_RAGGED = SleepingModel("lengths-ragged", _BATCH_S, max_batch_size=64, ragged=True)
_SHORTEST, _LONGEST, _DRAWN = 16, 512, 64
_ALL = range(_SHORTEST, _LONGEST + 1)
_ZIPF_WEIGHTS = [1 / rank for rank in range(1, len(_ALL) + 1)]
_LENGTHS: Final = {
    "same": (264,),
    "two": (16, 512),
    "four": (16, 128, 256, 512),
    "sixteen": tuple(range(32, 513, 32)),
    "uniform": tuple(random.Random(1).choices(_ALL, k=_DRAWN)),
    "zipf": tuple(random.Random(1).choices(_ALL, _ZIPF_WEIGHTS, k=_DRAWN)),
}
_TITLES: Final = {
    "same": "one length",
    "two": "two lengths",
    "four": "four lengths",
    "sixteen": "sixteen lengths",
    "uniform": f"lengths {_SHORTEST} to {_LONGEST}, uniform",
    "zipf": f"lengths {_SHORTEST} to {_LONGEST}, Zipf",
}
#: A rare request comes after so many others, about.
_RARE_EVERY_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class RareLoad(MixedHttpLoad):
    """The same, and beside it one request of another length at a time, whose latencies are kept."""

    rare: LengthsPayload

    def run(self, one: RunningServer, seconds: float, answer: bytes) -> LoadResult:
        (request,) = self.rare.http_requests(Api.HTTP_BINARY)
        times_s: list[float] = []
        ended = threading.Event()

        def ask() -> None:
            while not ended.wait(_RARE_EVERY_S):
                began_at = time.perf_counter()
                post(one, request)
                times_s.append(time.perf_counter() - began_at)

        thread = threading.Thread(target=ask)
        thread.start()
        try:
            result = super(RareLoad, self).run(one, seconds, answer)
        finally:
            ended.set()
            thread.join()
        return LoadResult.of_times(result.answers, result.answers_per_s, times_s)


def _rows(prefix: str, model: SleepingModel, title: str, goal: float | None = None) -> tuple[Row, ...]:
    goals = () if goal is None else (("triton", Goal(goal, at_least=True)),)
    return tuple(
        Row(
            f"{prefix}-{name}",
            f"{title}, {_TITLES[name]}",
            MixedHttpLoad(LengthsPayload(model.name, lengths), 64),
            Measure.THROUGHPUT,
            Goals(named=goals),
        )
        for name, lengths in _LENGTHS.items()
    )


_RARE = Row(
    "shapes-rare",
    "batches of one length, p99 of a rare length beside the full load of another",
    RareLoad(LengthsPayload(_PLAIN.name, (264,)), 64, LengthsPayload(_PLAIN.name, (16,))),
    Measure.TAIL,
)


class LengthsGpuServe(DeployedGpuServe):
    models = frozenset({_PLAIN.name, _RAGGED.name})


class LengthsTriton(DeployedTriton):
    models = frozenset({_RAGGED.name})

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        return super().command(ports, sorted(self.models))

    def ready_paths(self, models: Sequence[str]) -> list[str]:
        return super().ready_paths(sorted(self.models))


class LengthsMosec(Mosec):
    models = frozenset({_RAGGED.name})
    roles = (("mosec_sleeping.py", "the program with the callable"), *Mosec.roles[1:])

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        python, *others = super().command(ports, models)
        return [python, str(MODELS_FOLDER / "mosec_sleeping.py"), *others[1:]]

    def environment(self) -> dict[str, str]:
        return {**super().environment(), "BATCH_SECONDS": str(_BATCH_S)}


class LengthsRepositoryGpuServe(GpuServe):
    """This server with the repository that Triton has."""

    models = frozenset({_RAGGED.name})

    def __init__(self, server: Server, folder: Path) -> None:
        super().__init__(server.cache)
        self._repository = folder / "repository"

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        write_repository(self._repository, [_RAGGED])
        return self._serve(self._repository, ports)


class Shapes(Requests):
    """Models by a config, beside Triton's model.py and mosec."""

    key = "shapes"
    rows = (
        *_rows("shapes", _PLAIN, "batches of one length"),
        *_rows("shapes-ragged", _RAGGED, "ragged batches", 1.3),
        _RARE,
    )
    models = (_PLAIN.name, _RAGGED.name)
    is_default = False

    def servers(self, plan: Plan) -> list[Server]:
        folder = plan.logs.parent / self.key
        folder.mkdir(parents=True, exist_ok=True)
        return [made for one in plan.servers if (made := self._server(one, folder)) is not None]

    def _server(self, server: Server, folder: Path) -> Server | None:
        match server:
            case GpuServe():
                return LengthsGpuServe(server.cache, [_PLAIN, _RAGGED], folder)
            case PlainTriton():
                return LengthsTriton(server.cache, [_RAGGED], folder)
            case Mosec():
                return LengthsMosec(server.cache)
        return None


class ShapesModelPy(Shapes):
    """The repository of Triton, on both servers."""

    key: ClassVar[str] = "shapes-model.py"
    rows = _rows("shapes-model-py", _RAGGED, "ragged batches of a model.py", 1.3)
    models = (_RAGGED.name,)

    def _server(self, server: Server, folder: Path) -> Server | None:
        if isinstance(server, GpuServe):
            return LengthsRepositoryGpuServe(server, folder)
        return super()._server(server, folder) if isinstance(server, PlainTriton) else None
