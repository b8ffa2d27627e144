"""Rows whose models are ``model.py`` files of one repository, which Triton and this server serve as it is."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks import payloads
from benchmarks.figures import Goal
from benchmarks.load import GrpcLoad, GrpcStreamLoad, Load
from benchmarks.payloads import EchoPayload, TokensPayload
from benchmarks.report import Plan
from benchmarks.request_section import Requests
from benchmarks.rows import Goals, Measure, Row
from benchmarks.servers import GpuServe, PlainTriton
from benchmarks.servers.server import (
    CHAIN,
    ECHO,
    MODELS_FOLDER,
    TOKENS,
    Ports,
    Server,
)


def _row(name: str, title: str, load: Load, measure: Measure, ratio: float) -> Row:
    goal = Goal(ratio, at_least=not measure.less_is_better)
    return Row(f"model-py-{name}", title, load, measure, Goals(goal))


_ASKS_TWICE = "model.py that asks another twice"
_GRPC_1, _GRPC_128 = GrpcLoad(EchoPayload(64), 1, 1, latency=True), GrpcLoad(EchoPayload(64), 8, 16)
_AT_ONCE = "128 in flight on 8 connections"
_CHAIN_LOAD, _TOKENS_LOAD = GrpcLoad(payloads.chain(64), 8, 16), GrpcStreamLoad(TokensPayload(256), 1, 64)
_LARGE_LOAD, _DECOUPLED = GrpcLoad(EchoPayload(1 << 20), 1, 1), "decoupled model.py, 256 responses a stream"
_MODEL_PY_ROWS = (
    _row("64-1", "model.py, gRPC 64 B, one in flight, median", _GRPC_1, Measure.LATENCY, 1.0),
    _row("64-8x16", f"model.py, gRPC 64 B, {_AT_ONCE}", _GRPC_128, Measure.THROUGHPUT, 2.0),
    _row("1m-1", "model.py, gRPC 1 MiB, one in flight", _LARGE_LOAD, Measure.BANDWIDTH, 1.1),
    _row("chain", f"{_ASKS_TWICE}, gRPC 64 B, {_AT_ONCE}", _CHAIN_LOAD, Measure.THROUGHPUT, 2.0),
    _row("tokens", f"{_DECOUPLED}, 64 streams", _TOKENS_LOAD, Measure.TOKENS, 3.0),
)


class RepositoryGpuServe(GpuServe):
    """This server with Triton's repository."""

    models = frozenset({ECHO, TOKENS, CHAIN})

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        return self._serve(MODELS_FOLDER / "triton", ports)


class RepositoryTriton(PlainTriton):
    """Triton, with its repository and no models of other rows."""

    models = RepositoryGpuServe.models


class ModelPy(Requests):
    key = "model.py"
    rows = _MODEL_PY_ROWS
    models = (ECHO, TOKENS, CHAIN)

    def servers(self, plan: Plan) -> list[Server]:
        kinds = {GpuServe: RepositoryGpuServe, PlainTriton: RepositoryTriton}
        return [kinds[type(one)](one.cache) for one in plan.servers if type(one) in kinds]
