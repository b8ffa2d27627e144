"""The JSON of OpenAI's answers: complete answers, chunks of streams, and embeddings."""

from __future__ import annotations

import base64
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from gpuserve.openai.answers import BadRequest, Delta, Embeddings, Token, ToolCall
from gpuserve.openai.request_types import ChatRequest, CompletionRequest, EmbeddingRequest

Node = dict[str, Any]


def dumps(document: Node) -> bytes:
    try:
        return orjson.dumps(document, option=orjson.OPT_SERIALIZE_NUMPY)
    except orjson.JSONEncodeError:  # a text with half a surrogate pair
        return orjson.dumps(_encodable(document), option=orjson.OPT_SERIALIZE_NUMPY)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, list):
        return [_encodable(one) for one in value]
    if isinstance(value, dict):
        return {key: _encodable(one) for key, one in value.items()}
    return value


class AnswerDocuments(ABC):
    """The writer of the documents of one request."""

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
        """Return a chunk of a stream: the new part of one answer."""
        made = {**self._chunk_head, "choices": [self.chunk_choice(index, delta)]}
        return dumps({**made, "usage": None} if self._shows_usage else made)

    def usage_chunk(self, usage: Node) -> bytes:
        """Return the chunk with the token counts, after the last chunk of a stream."""
        return dumps({**self._chunk_head, "choices": [], "usage": usage})

    def whole(self, answers: Sequence[Sequence[Delta]], usage: Node) -> bytes:
        """Return all answers in one document."""
        choices = [self.whole_choice(index, deltas) for index, deltas in enumerate(answers)]
        return dumps({**self._head, "choices": choices, "usage": usage})

    @abstractmethod
    def chunk_choice(self, index: int, delta: Delta) -> Node:
        """Return a choice in a chunk of a stream."""

    @abstractmethod
    def whole_choice(self, index: int, deltas: Sequence[Delta]) -> Node:
        """Return a choice in a complete answer."""


class ChatDocuments(AnswerDocuments):
    """The writer of the documents of a chat completion."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, request: ChatRequest) -> None:
        super().__init__(request.model, shows_usage=request.wants_usage)
        self._logprobs = request.logprobs
        self._started: set[int] = set()
        self._call_ids: dict[tuple[int, int], str] = {}

    def chunk_choice(self, index: int, delta: Delta) -> Node:
        content: Node = {}
        if index not in self._started:
            self._started.add(index)
            content = {"role": "assistant", "content": ""}
        if delta.text:
            content["content"] = delta.text
        if delta.tool_call is not None:
            content["tool_calls"] = [self._tool_call_part(index, delta.tool_call)]
        return self._choice(index, "delta", content, delta.tokens, delta.finish_reason or None)

    def whole_choice(self, index: int, deltas: Sequence[Delta]) -> Node:
        text = "".join([one.text for one in deltas])
        calls = self._tool_calls(index, [one.tool_call for one in deltas if one.tool_call is not None])
        message: Node = {"role": "assistant", "content": text if text or not calls else None}
        if calls:
            message["tool_calls"] = calls
        tokens = [token for one in deltas for token in one.tokens]
        return self._choice(index, "message", message, tokens, deltas[-1].finish_reason)

    def _choice(
        self, index: int, key: str, content: Node, tokens: Sequence[Token], reason: str | None
    ) -> Node:
        logprobs = self._logprobs_of(tokens)
        return {"index": index, key: content, "logprobs": logprobs, "finish_reason": reason}

    def _tool_call_part(self, index: int, call: ToolCall) -> Node:
        key = (index, call.index)
        if key in self._call_ids:
            return {"index": call.index, "function": {"arguments": call.arguments}}
        self._call_ids[key] = call.id or f"call_{secrets.token_hex(12)}"
        return {"index": call.index, **_tool_call(self._call_ids[key], call.name, call.arguments)}

    def _tool_calls(self, index: int, parts: Iterable[ToolCall]) -> list[Node]:
        whole: dict[int, list[ToolCall]] = {}
        for one in parts:
            whole.setdefault(one.index, []).append(one)
        made = []
        for number in sorted(whole):
            arguments = "".join(one.arguments for one in whole[number])
            part = self._tool_call_part(index, whole[number][0])
            made.append(_tool_call(part["id"], part["function"]["name"], arguments))
        return made

    def _logprobs_of(self, tokens: Sequence[Token]) -> Node | None:
        known = [one for one in tokens if one.logprob is not None]
        if not (self._logprobs and known):
            return None
        content = [
            {
                **_token_logprob(one.text, one.logprob),
                "top_logprobs": [_token_logprob(*pair) for pair in one.top_logprobs],
            }
            for one in known
        ]
        return {"content": content, "refusal": None}


class CompletionDocuments(AnswerDocuments):
    """The writer of the documents of a completion."""

    prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def __init__(self, request: CompletionRequest) -> None:
        super().__init__(request.model, shows_usage=request.wants_usage)
        self._logprobs = request.logprobs is not None
        #: The offset of the next token of each answer in its text.
        self._offsets: dict[int, int] = {}

    def chunk_choice(self, index: int, delta: Delta) -> Node:
        return {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs_of(index, delta.tokens),
            "finish_reason": delta.finish_reason or None,
        }

    def whole_choice(self, index: int, deltas: Sequence[Delta]) -> Node:
        tokens = [token for one in deltas for token in one.tokens]
        whole = Delta("".join([one.text for one in deltas]), tokens, None, deltas[-1].finish_reason)
        return self.chunk_choice(index, whole)

    def _logprobs_of(self, index: int, tokens: Sequence[Token]) -> Node | None:
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


def _tool_call(call_id: str, name: str, arguments: str) -> Node:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _token_logprob(text: str, logprob: float | None) -> Node:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}


Vectors = NDArray[np.float32]


def split_embeddings(returned: Any, requests: Sequence[EmbeddingRequest]) -> list[Embeddings]:
    """Return each request's embeddings from those of all inputs. Raise ValueError for a wrong number."""
    made = returned if isinstance(returned, Embeddings) else Embeddings(returned)
    inputs = [one for request in requests for one in request.inputs]
    rows, tokens = _vector_rows(made.vectors), made.prompt_tokens
    if tokens is None:
        tokens = [0 if isinstance(one, str) else len(one) for one in inputs]
    elif isinstance(tokens, int) and len(requests) == 1:
        tokens = [tokens, *[0] * (len(inputs) - 1)]
    counts = np.atleast_1d(tokens)
    for what, given in (("vectors", rows), ("numbers of tokens", counts)):
        if len(given) != len(inputs):
            raise ValueError(f"expected {len(inputs)} {what}, one for each input, got {len(given)}")
    ends = np.cumsum([len(one.inputs) for one in requests])
    parts = [slice(end - len(one.inputs), end) for one, end in zip(requests, ends, strict=True)]
    return [Embeddings(rows[one], int(counts[one].sum())) for one in parts]


def embedding_document(request: EmbeddingRequest, returned: Any) -> bytes:
    """Return the answer to a request for embeddings. Raise ``BadRequest`` if the client wants longer vectors
    than the model returned, and ValueError or TypeError if the callable returned no vectors.
    """
    [made] = split_embeddings(returned, [request])
    rows = made.vectors
    width, dimensions = rows.shape[1], request.dimensions
    if dimensions is not None and dimensions > width:
        raise BadRequest(f"this model's vectors have {width}, given {dimensions}", "dimensions")
    if dimensions is not None and dimensions < width:
        cut = rows[:, :dimensions]
        norms = np.linalg.norm(cut, axis=1, keepdims=True)
        rows = np.ascontiguousarray(cut / np.where(norms, norms, 1), dtype="<f4")
    usage = {"prompt_tokens": made.prompt_tokens, "total_tokens": made.prompt_tokens}
    vectors: Any = rows
    if request.encoding_format == "base64":
        vectors = [base64.b64encode(row.tobytes()).decode() for row in rows]
    data = [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(vectors)]
    return dumps({"object": "list", "data": data, "model": request.model, "usage": usage})


def _vector_rows(vectors: Any) -> Vectors:
    """Return vectors of any library as float32 [rows, dimensions]."""
    if hasattr(vectors, "detach"):  # a tensor of torch
        vectors = vectors.detach().float().cpu().numpy()
    rows: Vectors = np.ascontiguousarray(vectors, dtype="<f4")
    if rows.ndim != 2:
        raise ValueError(f"expected vectors of shape [inputs, dimensions], got {list(rows.shape)}")
    return rows
