"""The section of server-sent events: pieces of text one by one, by ``generate_stream`` and by OpenAI's chat,
from callables that make them at no cost. Only this server has both.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from benchmarks import load
from benchmarks.load import HttpLoad, LoadResult
from benchmarks.payloads import INFER, HttpRequest, grpc_request, json_request, post
from benchmarks.report import Plan
from benchmarks.request_section import RequestPart
from benchmarks.rounds import Comparison, LoadedServer, Subject, measure
from benchmarks.rows import Measure, Row
from benchmarks.servers import GpuServe
from benchmarks.servers.server import MODELS_FOLDER, Api, Ports, RunningServer, ServerFailed, running

WORDS, CHAT = "words", "chat"
WORD = "token "


@dataclass(frozen=True, slots=True)
class WordsPayload:
    """One request for so many pieces of text, each an event of its own."""

    messages: int
    model = WORDS
    nbytes = 4
    path = INFER

    def grpc_message(self) -> bytes:
        """A serialized ModelInferRequest."""
        return grpc_request(self.model, "count", "INT32", (1,), np.int32(self.messages).tobytes())

    def http_request(self, api: Api) -> HttpRequest:
        """The request for a stream of events."""
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
        """A serialized ModelInferRequest."""
        body = self._body()
        return grpc_request(self.model, "request", "BYTES", (1,), len(body).to_bytes(4, "little") + body)

    def http_request(self, api: Api) -> HttpRequest:
        """The request for a stream of events."""
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
        """One wrk run; see ``Load``."""
        found = super(EventsLoad, self).run(one, seconds, answer)
        events = self.payload.messages
        return LoadResult(found.answers * events, found.answers_per_s * events)


def _row(name: str, title: str, payload: WordsPayload | ChatPayload, connections: int) -> Row:
    streams = "1 stream" if connections == 1 else f"{connections} streams"
    title = f"{title}, {payload.messages} events a stream, {streams}"
    return Row(f"{name}-{connections}", title, EventsLoad(payload, connections), Measure.TOKENS)


ROWS = tuple(
    _row(name, title, payload, connections)
    for connections in (1, 16)
    for name, title, payload in (
        ("events-generate", "generate_stream", WordsPayload(256)),
        ("events-openai", "/v1/chat/completions", ChatPayload(256)),
    )
)


class EventsGpuServe(GpuServe):
    """This server with the two models of this section."""

    models = frozenset({WORDS, CHAT})
    apis = frozenset({Api.HTTP_JSON})

    def command(self, ports: Ports, models: Sequence[str]) -> list[str]:
        flags = ["--http-port", ports.http, "--grpc-port", ports.grpc, "--metrics-port", ports.metrics]
        return [str(self._program), "serve", str(MODELS_FOLDER / "events.yaml"), *map(str, flags)]


class Events:
    """The section with the rows of server-sent events."""

    names = tuple(row.name for row in ROWS)
    is_default = False

    def missing(self, name: str) -> str | None:
        """Why the load generator of a row cannot run here; None when it can."""
        return next((load.missing(row.load) for row in ROWS if row.name == name), None)

    def measure(self, plan: Plan) -> EventsPart | None:
        """Measure the chosen rows, interleaved."""
        rows = [row for row in ROWS if row.name in plan.names]
        servers = [EventsGpuServe(one.cache) for one in plan.servers if isinstance(one, GpuServe)]
        if not rows or not servers:
            return None
        (server,) = servers
        server.prepare()
        with ExitStack() as stack:
            up = stack.enter_context(running(server, plan.logs, (WORDS, CHAT)))
            subjects: list[Subject] = [LoadedServer(server, {None: up})]
            samples = measure(rows, subjects, plan.rounds, plan.seconds, plan.say)
        return EventsPart(rows, {server.name: server.title}, Comparison({server.name: server.kind}, samples))


@dataclass(frozen=True, slots=True)
class EventsPart(RequestPart):
    """The rows as they were measured."""

    key: ClassVar[str] = "events"


def _events(text: bytes) -> list[str]:
    return [one.removeprefix("data: ") for one in text.decode().split("\n\n") if one]
