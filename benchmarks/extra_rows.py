"""Sections whose rows have models of their own: a Triton repository of ``model.py`` files, served by Triton
and by this server as it is, and server-sent events, from callables of this server that make them at no cost.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from benchmarks import payloads
from benchmarks.load import GrpcLoad, GrpcStreamLoad, HttpLoad, LoadResult
from benchmarks.payloads import (
    INFER,
    EchoPayload,
    HttpRequest,
    Tensor,
    TokensPayload,
    grpc_request,
    json_request,
    post,
)
from benchmarks.report import Plan
from benchmarks.request_section import Requests
from benchmarks.rows import Goals, Measure, Row, Target
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


def _at_least(ratio: float) -> Goals:
    return Goals(Target(ratio))


_MODEL_PY_ROWS = (
    Row(
        "model-py-64-1",
        "model.py, gRPC 64 B, one in flight, median",
        GrpcLoad(EchoPayload(64), 1, 1, latency=True),
        Measure.LATENCY,
        Goals(Target(1.0, at_most=True)),
    ),
    Row(
        "model-py-64-8x16",
        "model.py, gRPC 64 B, 128 in flight on 8 connections",
        GrpcLoad(EchoPayload(64), 8, 16),
        Measure.THROUGHPUT,
        _at_least(2.0),
    ),
    Row(
        "model-py-1m-1",
        "model.py, gRPC 1 MiB, one in flight",
        GrpcLoad(EchoPayload(1 << 20), 1, 1),
        Measure.BANDWIDTH,
        _at_least(1.1),
    ),
    Row(
        "model-py-chain",
        "model.py that asks another twice, gRPC 64 B, 128 in flight on 8 connections",
        GrpcLoad(payloads.chain(64), 8, 16),
        Measure.THROUGHPUT,
        _at_least(2.0),
    ),
    Row(
        "model-py-tokens",
        "decoupled model.py, 256 responses a stream, 64 streams",
        GrpcStreamLoad(TokensPayload(256), 1, 64),
        Measure.TOKENS,
        _at_least(3.0),
    ),
)


class _OwnModels(GpuServe):
    """This server with the models of a section; ``config`` is in the folder of models."""

    config: ClassVar[str]

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        return self._serve(MODELS_FOLDER / self.config, ports)


class RepositoryGpuServe(_OwnModels):
    """This server, with the repository that Triton is given."""

    config = "triton"
    models = frozenset({ECHO, TOKENS, CHAIN})


class RepositoryTriton(PlainTriton):
    """Triton, with its repository and no models of other rows."""

    models = RepositoryGpuServe.models


class EventsGpuServe(_OwnModels):
    """This server with the two models that give text piece by piece."""

    config = "events.yaml"
    models = frozenset({WORDS, CHAT})
    apis = frozenset({Api.HTTP_JSON})


class ModelPy(Requests):
    """The section with the rows of ``model.py`` files."""

    key = "model.py"
    rows = _MODEL_PY_ROWS
    models = (ECHO, TOKENS, CHAIN)

    def servers(self, plan: Plan) -> list[Server]:
        kinds = {GpuServe: RepositoryGpuServe, PlainTriton: RepositoryTriton}
        return [kinds[type(one)](one.cache) for one in plan.servers if type(one) in kinds]


@dataclass(frozen=True, slots=True)
class WordsPayload:
    """One request for so many pieces of text, each an event of its own."""

    messages: int
    model = WORDS
    nbytes = 4
    path = INFER

    def grpc_message(self) -> bytes:
        return grpc_request(self.model, Tensor("count", "INT32", (1,), np.int32(self.messages).tobytes()))

    def http_request(self, api: Api) -> HttpRequest:
        del api  # there is one only
        return json_request(f"/v2/models/{WORDS}/generate_stream", {"count": self.messages})

    def check(self, running: RunningServer, api: Api) -> bytes:
        """Count the events; see ``Payload``."""
        events = _events(post(running, self.http_request(api)))
        if [json.loads(one)["text"] for one in events] != [WORD] * self.messages:
            raise ServerFailed(f"{running.server.title} gives {len(events)} events that are not right")
        return b""


@dataclass(frozen=True, slots=True)
class ChatPayload:
    """The same of OpenAI's chat completions."""

    messages: int
    model = CHAT
    nbytes = 4
    path = INFER

    def grpc_message(self) -> bytes:
        body = self._body()
        return grpc_request(
            self.model, Tensor("request", "BYTES", (1,), len(body).to_bytes(4, "little") + body)
        )

    def http_request(self, api: Api) -> HttpRequest:
        del api  # there is one only
        return HttpRequest("/v1/chat/completions", self._body(), {"Content-Type": "application/json"})

    def check(self, running: RunningServer, api: Api) -> bytes:
        """Put the chunks together; see ``Payload``."""
        *chunks, last = _events(post(running, self.http_request(api)))
        texts = [json.loads(one)["choices"][0]["delta"].get("content", "") for one in chunks]
        if texts != [WORD] * self.messages or last != "[DONE]":
            raise ServerFailed(f"{running.server.title} gives {len(chunks)} chunks that are not right")
        return b""

    def _body(self) -> bytes:
        messages = [{"role": "user", "content": "talk"}]
        asked = {"model": CHAT, "messages": messages, "stream": True, "max_tokens": self.messages}
        return json.dumps(asked).encode()


@dataclass(frozen=True, slots=True)
class EventsLoad(HttpLoad):
    """wrk, whose answers are streams: each event counts."""

    apis: ClassVar[tuple[Api, ...]] = (Api.HTTP_JSON,)

    def run(self, one: RunningServer, seconds: float, answer: bytes) -> LoadResult:
        found = super(EventsLoad, self).run(one, seconds, answer)
        events = self.payload.messages
        return LoadResult(found.answers * events, found.answers_per_s * events)


def _event_row(name: str, title: str, payload: WordsPayload | ChatPayload, connections: int) -> Row:
    streams = "1 stream" if connections == 1 else f"{connections} streams"
    title = f"{title}, {payload.messages} events a stream, {streams}"
    return Row(f"{name}-{connections}", title, EventsLoad(payload, connections), Measure.TOKENS)


_EVENT_ROWS = tuple(
    _event_row(name, title, payload, connections)
    for connections in (1, 16)
    for name, title, payload in (
        ("events-generate", "generate_stream", WordsPayload(256)),
        ("events-openai", "/v1/chat/completions", ChatPayload(256)),
    )
)


class Events(Requests):
    """The section with the rows of server-sent events."""

    key = "events"
    rows = _EVENT_ROWS
    models = (WORDS, CHAT)
    is_default = False

    def servers(self, plan: Plan) -> list[Server]:
        return [EventsGpuServe(one.cache) for one in plan.servers if isinstance(one, GpuServe)]


def _events(text: bytes) -> list[str]:
    return [one.removeprefix("data: ") for one in text.decode().split("\n\n") if one]
