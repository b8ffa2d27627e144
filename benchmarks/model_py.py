"""The section of ``model.py`` files: a repository of Triton, served by Triton and by this server as it is."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

from benchmarks import load
from benchmarks.load import GrpcLoad, GrpcStreamLoad
from benchmarks.payloads import ChainPayload, EchoPayload, TokensPayload
from benchmarks.report import Plan
from benchmarks.request_section import RequestPart
from benchmarks.rounds import Comparison, LoadedServer, Subject, measure
from benchmarks.rows import Goals, Measure, Row, Target
from benchmarks.servers import GpuServe, PlainTriton
from benchmarks.servers.server import CHAIN, ECHO, MODELS_FOLDER, TOKENS, Ports, ServerFailed, running

_MODELS = (ECHO, TOKENS, CHAIN)
_SMALL = EchoPayload(64)
_LARGE = EchoPayload(1 << 20)


def _goal(ratio: float, *, at_most: bool = False) -> Goals:
    return Goals(Target(ratio, at_most))


ROWS = (
    Row(
        "model-py-64-1",
        "model.py, gRPC 64 B, one in flight, median",
        GrpcLoad(_SMALL, connections=1, streams=1, latency=True),
        Measure.LATENCY,
        _goal(1.0, at_most=True),
    ),
    Row(
        "model-py-64-8x16",
        "model.py, gRPC 64 B, 128 in flight on 8 connections",
        GrpcLoad(_SMALL, connections=8, streams=16),
        Measure.THROUGHPUT,
        _goal(2.0),
    ),
    Row(
        "model-py-1m-1",
        "model.py, gRPC 1 MiB, one in flight",
        GrpcLoad(_LARGE, connections=1, streams=1),
        Measure.BANDWIDTH,
        _goal(1.1),
    ),
    Row(
        "model-py-chain",
        "model.py that asks another twice, gRPC 64 B, 128 in flight on 8 connections",
        GrpcLoad(ChainPayload(64), connections=8, streams=16),
        Measure.THROUGHPUT,
        _goal(2.0),
    ),
    Row(
        "model-py-tokens",
        "decoupled model.py, 256 responses a stream, 64 streams",
        GrpcStreamLoad(TokensPayload(256), connections=1, streams=64),
        Measure.TOKENS,
        _goal(3.0),
    ),
)


class RepositoryGpuServe(GpuServe):
    """This server, with the repository that Triton is given."""

    models = frozenset(_MODELS)

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        flags = ["--http-port", ports.http, "--grpc-port", ports.grpc, "--metrics-port", ports.metrics]
        return [str(self._program), "serve", str(MODELS_FOLDER / "triton"), *map(str, flags)]


class RepositoryTriton(PlainTriton):
    """Triton, with its repository and no models of other rows."""

    models = frozenset(_MODELS)


class ModelPy:
    """The section with the rows of ``model.py`` files."""

    names = tuple(row.name for row in ROWS)
    is_default = True

    def missing(self, name: str) -> str | None:
        """Why the load generator of a row cannot run here; None when it can."""
        return next((load.missing(row.load) for row in ROWS if row.name == name), None)

    def measure(self, plan: Plan) -> ModelPyPart | None:
        """Measure the chosen rows on both servers, interleaved."""
        rows = [row for row in ROWS if row.name in plan.names]
        servers = [
            (RepositoryGpuServe if isinstance(one, GpuServe) else RepositoryTriton)(one.cache)
            for one in plan.servers
            if isinstance(one, GpuServe | PlainTriton)
        ]
        if not rows or not servers:
            return None
        not_up: dict[str, str] = {}
        subjects: list[Subject] = []
        with ExitStack() as stack:
            for server in servers:
                try:
                    up = stack.enter_context(running(server, plan.logs, _MODELS))
                    subjects.append(LoadedServer(server, {None: up}))
                except ServerFailed as error:
                    not_up[server.log_name] = str(error)
            samples = measure(rows, subjects, plan.rounds, plan.seconds, plan.say)
        samples.not_up.update(not_up)
        kinds = {one.name: one.kind for one in servers}
        return ModelPyPart(rows, {one.name: one.title for one in subjects}, Comparison(kinds, samples))


@dataclass(frozen=True, slots=True)
class ModelPyPart(RequestPart):
    """The rows as they were measured."""

    key: ClassVar[str] = "model.py"
