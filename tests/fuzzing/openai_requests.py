"""Bodies of OpenAI's API: refused in words, or read by the front and by a worker as Python's own parser reads
them.
"""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from gpuserve.core.errors import RequestError
from gpuserve.front.protocols.openai_api import openai_failure, outline_json, read_body
from gpuserve.model.spec import ModelSpec
from gpuserve.openai import BadRequest, ChatRequest, CompletionRequest, EmbeddingRequest
from gpuserve.openai.request_types import parse_request

_KINDS = (ChatRequest, CompletionRequest, EmbeddingRequest)
_MODEL = ModelSpec(name="m", inputs=(), outputs=(), openai=True)
_TEXTS = st.sampled_from(["", "a", "user", "é", "\ud800", "text"])
_LEAVES = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | _TEXTS
_TREES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["type", "text", "role", "content", "x"]), inner, max_size=3)
    ),
    max_leaves=8,
)
_FIELDS = {*ChatRequest.model_fields, *CompletionRequest.model_fields, *EmbeddingRequest.model_fields}
_ALWAYS = {"model": st.just("m") | _LEAVES, "prompt": _TREES, "input": _TREES}
_MESSAGE = st.fixed_dictionaries({"role": st.just("user") | _LEAVES, "content": _TREES})
_DOCUMENTS = st.fixed_dictionaries(
    {**_ALWAYS, "messages": st.lists(_MESSAGE, max_size=2)},
    optional=dict.fromkeys(sorted(_FIELDS - {"messages", *_ALWAYS}), _TREES),
)
INPUTS = st.binary(max_size=64) | _DOCUMENTS.map(lambda one: json.dumps(one).encode())


def check(body: bytes) -> None:
    try:
        request = read_body([body])
    except RequestError as error:
        told = json.loads(openai_failure(error).body)["error"]
        assert told.keys() == {"message", "type", "param", "code"}
        assert told["message"]
        return
    document: Any = json.loads(body)
    assert request.streams is (document.get("stream") is True)
    outlined = json.loads(outline_json([body[:7], body[7:]]))
    assert outlined["model"] == document["model"], "a long body goes where a short one does"
    assert outlined.get("stream") == document.get("stream")
    for kind in _KINDS:
        try:
            asked = parse_request(kind, body, {})
        except BadRequest as refused:
            text = str(refused)
            assert text
            assert "\n" not in text, "a client sees the first line"
        else:
            assert asked.model == document["model"]
