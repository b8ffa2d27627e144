"""What a callable gives for a request of an OpenAI client, where plain text does not say all. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

#: ``errors.Code`` of what the client has to change.
_INVALID: Final = "INVALID_ARGUMENT"


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of the text.

    ``count`` is how many tokens it stands for. With a ``finish_reason`` ("stop", "length", "tool_calls",
    "content_filter") it is the last piece. ``logprob`` is the token's log probability, and ``top_logprobs``
    are the likeliest tokens in its place with theirs; they are sent where the client asks for them.
    """

    text: str
    count: int = 1
    finish_reason: str = ""
    logprob: float | None = None
    top_logprobs: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of one of the request's tools, or a part of it: parts with one ``index`` are one call.

    ``arguments`` is JSON, or a piece of it. A call whose ``id`` is "" is given one.
    """

    name: str = ""
    arguments: str = ""
    id: str = ""
    index: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """How many tokens the prompt has, and how many were made, where that is not the count of the pieces."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of one request, one a row, and how many tokens its inputs have."""

    vectors: Any
    prompt_tokens: int = 0


class _Code(NamedTuple):
    value: str


class BadRequest(Exception):
    """A callable raises it where the client has to ask otherwise: the answer has status 400 and this text.
    ``param`` is the member of the request that is wrong.
    """

    code = _Code(_INVALID)

    def __init__(self, text: str, param: str = "") -> None:
        super().__init__(f"{param}: {text}" if param else text)


class NoSuchEndpoint(Exception):
    """The model does not answer this endpoint."""

    code = _Code("NOT_FOUND")


def without_frames(error: Exception) -> Exception:
    """Return the error without its traceback, cause and context.

    Their frames refer to the request, which keeps the error as its answer: without this, the body of a
    request that failed stays in memory until the garbage collector runs.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)
