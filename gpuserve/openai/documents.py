"""The JSON of OpenAI's answers: whole ones, and the chunks of streams. Pure; what is said in them is decided
elsewhere (``choice.py``).
"""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import orjson

from gpuserve.openai.answers import Token, ToolCall
from gpuserve.openai.choice import Delta
from gpuserve.openai.requests import ChatRequest, CompletionRequest

Node = dict[str, Any]


def dumps(document: Node) -> bytes:
    try:
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:  # a text of half a character
        return orjson.dumps(_encodable(document), option=orjson.OPT_SERIALIZE_NUMPY)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_encodable(one) for one in value]
    if isinstance(value, dict):
        return {key: _encodable(one) for key, one in value.items()}
    return value


def usage_document(prompt_tokens: int, completion_tokens: int) -> Node:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


class Documents(ABC):
    """The documents of one request."""

    prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, model: str, *, shows_usage: bool) -> None:
        self._head: Node = {
            "id": self.prefix + secrets.token_hex(12),
            "object": self.whole_object,
            "created": int(time.time()),
            "model": model,
        }
        self._chunk_head = self._head | {"object": self.chunk_object}
        self._shows_usage = shows_usage

    def chunk(self, index: int, delta: Delta) -> bytes:
        """One chunk of a stream: what is new of one answer."""
        made = {**self._chunk_head, "choices": [self.part(index, delta)]}
        return dumps({**made, "usage": None} if self._shows_usage else made)

    def usage(self, usage: Node) -> bytes:
        """The chunk after the last of a stream."""
        return dumps({**self._chunk_head, "choices": [], "usage": usage})

    def whole(self, answers: Sequence[Sequence[Delta]], usage: Node) -> bytes:
        """All of the answers at once, each of all its deltas."""
        choices = [self.choice(index, deltas) for index, deltas in enumerate(answers)]
        return dumps({**self._head, "choices": choices, "usage": usage})

    @abstractmethod
    def part(self, index: int, delta: Delta) -> Node:
        """What a chunk of a stream says of one of its choices."""

    @abstractmethod
    def choice(self, index: int, deltas: Sequence[Delta]) -> Node:
        """A choice in a whole answer."""


class ChatDocuments(Documents):
    """The documents of a chat completion."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, asked: ChatRequest) -> None:
        super().__init__(asked.model, shows_usage=asked.wants_usage)
        self._logprobs = asked.logprobs
        self._begun: set[int] = set()
        self._call_ids: dict[tuple[int, int], str] = {}

    def part(self, index: int, delta: Delta) -> Node:
        content: Node = {}
        if index not in self._begun:
            self._begun.add(index)
            content = {"role": "assistant", "content": ""}
        if delta.text:
            content["content"] = delta.text
        if delta.tool_call is not None:
            content["tool_calls"] = [self._call_part(index, delta.tool_call)]
        return {
            "index": index,
            "delta": content,
            "logprobs": self._told(delta.tokens),
            "finish_reason": delta.finish_reason or None,
        }

    def choice(self, index: int, deltas: Sequence[Delta]) -> Node:
        text = "".join([one.text for one in deltas])
        calls = self._calls(index, [one.tool_call for one in deltas if one.tool_call is not None])
        message: Node = {"role": "assistant", "content": text if text or not calls else None}
        if calls:
            message["tool_calls"] = calls
        tokens = [token for one in deltas for token in one.tokens]
        return {
            "index": index,
            "message": message,
            "logprobs": self._told(tokens),
            "finish_reason": deltas[-1].finish_reason,
        }

    def _call_part(self, index: int, call: ToolCall) -> Node:
        key = (index, call.index)
        if key in self._call_ids:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        self._call_ids[key] = call.id or f"call_{secrets.token_hex(12)}"
        return {"index": call.index, **_call(self._call_ids[key], call.name, call.arguments)}

    def _calls(self, index: int, parts: Iterable[ToolCall]) -> list[Node]:
        whole: dict[int, list[ToolCall]] = {}
        for one in parts:
            whole.setdefault(one.index, []).append(one)
        made = []
        for number in sorted(whole):
            arguments = "".join(one.arguments for one in whole[number])
            part = self._call_part(index, whole[number][0])
            made.append(_call(part["id"], part["function"]["name"], arguments))
        return made

    def _told(self, tokens: Sequence[Token]) -> Node | None:
        known = [one for one in tokens if one.logprob is not None]
        if not (self._logprobs and known):
            return None
        content = [
            {
                **_likelihood(one.text, one.logprob),
                "top_logprobs": [_likelihood(*pair) for pair in one.top_logprobs],
            }
            for one in known
        ]
        return {"content": content, "refusal": None}


class CompletionDocuments(Documents):
    """The documents of a completion."""

    prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(self, asked: CompletionRequest) -> None:
        super().__init__(asked.model, shows_usage=asked.wants_usage)
        self._logprobs = asked.logprobs is not None
        #: Where the next token of each answer begins in its text.
        self._offsets: dict[int, int] = {}

    def part(self, index: int, delta: Delta) -> Node:
        return {
            "index": index,
            "text": delta.text,
            "logprobs": self._told(index, delta.tokens),
            "finish_reason": delta.finish_reason or None,
        }

    def choice(self, index: int, deltas: Sequence[Delta]) -> Node:
        tokens = [token for one in deltas for token in one.tokens]
        whole = Delta("".join([one.text for one in deltas]), tokens, None, deltas[-1].finish_reason)
        return self.part(index, whole)

    def _told(self, index: int, tokens: Sequence[Token]) -> Node | None:
        known = [one for one in tokens if one.logprob is not None]
        if not (self._logprobs and known):
            return None
        offsets = []
        for one in known:
            offsets.append(self._offsets.setdefault(index, 0))
            self._offsets[index] += len(one.text)
        return {
            "tokens": [one.text for one in known],
            "token_logprobs": [one.logprob for one in known],
            "top_logprobs": [dict(one.top_logprobs) for one in known],
            "text_offset": offsets,
        }


def _call(call_id: str, name: str, arguments: str) -> Node:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _likelihood(text: str, logprob: float | None) -> Node:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}
