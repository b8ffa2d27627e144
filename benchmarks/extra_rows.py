"""Sections whose rows have models of their own: a Triton repository of ``model.py`` files, served by Triton
and by this server as it is, and server-sent events, from callables of this server that make them at no cost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from benchmarks import payloads
from benchmarks.figures import Goal
from benchmarks.load import GrpcLoad, GrpcStreamLoad, HttpLoad, Load, LoadResult
from benchmarks.payloads import EchoPayload, HttpRequest, Payload, TokensPayload, json_request, post
from benchmarks.report import Plan
from benchmarks.request_section import Requests
from benchmarks.rows import Goals, Measure, Row
from benchmarks.servers import GpuServe, PlainTriton
from benchmarks.servers.server import (
    CHAIN,
    ECHO,
    MODELS_FOLDER,
    TOKENS,
    Api,
    Ports,
    RunningServer,
    Server,
    ServerFailed,
)

WORDS, CHAT = "words", "chat"
WORD = "token "


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


class OwnModels(GpuServe):
    """This server with the models of a section; ``config`` is in the folder of models."""

    config: ClassVar[str]

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        return self._serve(MODELS_FOLDER / self.config, ports)


class RepositoryGpuServe(OwnModels):
    config = "triton"
    models = frozenset({ECHO, TOKENS, CHAIN})


class RepositoryTriton(PlainTriton):
    """Triton, with its repository and no models of other rows."""

    models = RepositoryGpuServe.models


class EventsGpuServe(OwnModels):
    """This server with the two models that give text piece by piece."""

    config = "events.yaml"
    models = frozenset({WORDS, CHAT})
    apis = frozenset({Api.HTTP_JSON})


class ModelPy(Requests):
    key = "model.py"
    rows = _MODEL_PY_ROWS
    models = (ECHO, TOKENS, CHAIN)

    def servers(self, plan: Plan) -> list[Server]:
        kinds = {GpuServe: RepositoryGpuServe, PlainTriton: RepositoryTriton}
        return [kinds[type(one)](one.cache) for one in plan.servers if type(one) in kinds]


@dataclass(frozen=True, slots=True)
class EventsPayload(Payload):
    """One request for so many pieces of text, each an event of its own: by ``generate_stream``, or, to the
    model ``chat``, by OpenAI's chat completions.
    """

    model: str
    messages: int
    nbytes = 4

    def http_request(self, api: Api) -> HttpRequest:
        if self.model == WORDS:
            return json_request(f"/v2/models/{WORDS}/generate_stream", {"count": self.messages})
        messages = [{"role": "user", "content": "talk"}]
        asked = {"model": CHAT, "messages": messages, "stream": True, "max_tokens": self.messages}
        return json_request("/v1/chat/completions", asked)

    def check(self, running: RunningServer, api: Api = Api.GRPC) -> bytes:
        text = post(running, self.http_request(api)).decode()
        events = [one.removeprefix("data: ") for one in text.split("\n\n") if one]
        if self.model == CHAT:
            *events, last = events
            texts = [json.loads(one)["choices"][0]["delta"].get("content", "") for one in events]
            is_right = last == "[DONE]" and texts == [WORD] * self.messages
        else:
            is_right = [json.loads(one)["text"] for one in events] == [WORD] * self.messages
        if not is_right:
            raise ServerFailed(f"{running.server.title} gives {len(events)} events that are not right")
        return b""


@dataclass(frozen=True, slots=True)
class EventsLoad(HttpLoad):
    """wrk, whose answers are streams: each event counts."""

    apis: ClassVar[tuple[Api, ...]] = (Api.HTTP_JSON,)

    def run(self, one: RunningServer, seconds: float, answer: bytes) -> LoadResult:
        found = super(EventsLoad, self).run(one, seconds, answer)
        events = self.payload.messages
        return LoadResult(found.answers * events, found.answers_per_s * events)


def _event_row(name: str, title: str, model: str, connections: int) -> Row:
    streams = "1 stream" if connections == 1 else f"{connections} streams"
    load = EventsLoad(EventsPayload(model, 256), connections)
    return Row(f"{name}-{connections}", f"{title}, 256 events a stream, {streams}", load, Measure.TOKENS)


_EVENT_ROWS = tuple(
    _event_row(name, title, model, connections)
    for connections in (1, 16)
    for name, title, model in (
        ("events-generate", "generate_stream", WORDS),
        ("events-openai", "/v1/chat/completions", CHAT),
    )
)


class Events(Requests):
    key = "events"
    rows = _EVENT_ROWS
    models = (WORDS, CHAT)
    is_default = False

    def servers(self, plan: Plan) -> list[Server]:
        return [EventsGpuServe(one.cache) for one in plan.servers if isinstance(one, GpuServe)]
