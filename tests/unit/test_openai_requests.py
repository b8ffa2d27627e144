"""OpenAI's requests and answers without a server: bodies read, texts cut, vectors written."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve import ModelConfig, Tensor
from gpuserve.api.binding import model_spec
from gpuserve.config.load import load_file
from gpuserve.config.problems import ConfigProblems
from gpuserve.core.errors import (
    BadModelConfig,
    InvalidArgument,
    NotFound,
    QueueFull,
    ResourceExhausted,
    Unavailable,
    inner_code,
    request_error,
)
from gpuserve.front.protocols import openai_api as errors
from gpuserve.front.protocols.openai_api import (
    OpenAIInferRequest,
    checked_openai_spec,
    outline_json,
    read_body,
)
from gpuserve.model import Batching
from gpuserve.model.self_description import declaration
from gpuserve.model.spec import ModelSpec
from gpuserve.openai import (
    BadRequest,
    ChatRequest,
    CompletionRequest,
    EmbeddingRequest,
    Embeddings,
    Token,
    Usage,
)
from gpuserve.openai.adapter import (
    HandlerArgument,
    OpenAIEndpoint,
    adapt_callable,
    each_value,
    handlers_of,
    merge_streams,
)
from gpuserve.openai.answers import AnswerChoice, StoppableText, StopSequences
from gpuserve.openai.documents import embedding_document, split_embeddings
from gpuserve.openai.endpoints import honoured_members
from gpuserve.openai.request_types import parse_request, request_for_each_answer, require_honoured
from gpuserve_worker.inference.inference_request import Request

# ---- stop sequences --------------------------------------------------------------------------------


def until(text: str, stops: list[str]) -> tuple[str, bool]:
    """What is before the stop sequence that is complete first, and whether there is one."""
    for end in range(1, len(text) + 1):
        found = [one for one in stops if text[:end].endswith(one)]
        if found:
            return text[: end - max(map(len, found))], True
    return text, False


#: Few characters, so that sequences overlap and begin each other; one of two halves, and each half.
FEW = st.text(["a", "b", "]", "\U0001f600", "\ud83d", "\ude00"], max_size=6) | st.text("ab", max_size=4)


@given(st.lists(FEW, max_size=8), st.lists(FEW.filter(bool), max_size=6))
def test_a_text_ends_where_its_first_stop_is_complete_however_it_is_cut(
    pieces: list[str], stops: list[str]
) -> None:
    cut = StoppableText(StopSequences(stops))
    left = ""
    for piece in pieces:
        left += cut.feed(piece)
        if cut.found:
            break
        assert until("".join(pieces), stops)[0].startswith(left), "what has left cannot be taken back"
    left += "" if cut.found else cut.rest()
    assert (left, cut.found) == until("".join(pieces), stops)


def test_only_what_may_begin_a_stop_is_held_back() -> None:
    cut = StoppableText(StopSequences(["END", "DONE"]))
    fed = [cut.feed(one) for one in ("so E", "N", "s", " D", "ON", "T")]
    assert fed == ["so ", "", "ENs", " ", "", "DONT"]


def cut_cpu_s(n: int) -> float:
    """The CPU time of looking for 16 long stop sequences in ``n`` characters that nearly are one."""
    cut = StoppableText(StopSequences(["a" * (1023 - shorter) + "b" for shorter in range(16)]))
    begun_s = time.process_time()
    left = sum([len(cut.feed("a")) for _ in range(n)])
    taken_s = time.process_time() - begun_s
    assert (left, cut.found) == (n - 1023, False)
    return taken_s


def test_the_time_for_stops_grows_with_the_text_and_no_faster() -> None:
    short_s, long_s = (min(cut_cpu_s(n) for _ in range(3)) for n in (20_000, 80_000))
    assert long_s < 8 * short_s, "quadratic would be 16"
    assert long_s < 1, "16 sequences of 1,024 characters cost as much as one"


# ---- one answer ------------------------------------------------------------------------------------


def texts(limit: int | None, stops: Any, *given_: Any) -> str:
    """The text of one answer to which this is added, and how it ends."""
    choice, made = AnswerChoice(limit, StopSequences(stops)), ""
    for one in given_:
        delta = choice.add(one)
        made += delta.text if delta else ""
        if choice.over:
            assert delta is not None
            return f"{made}|{delta.finish_reason}"
    end = choice.end()
    return f"{made}{end.text}|{end.finish_reason}"


def test_an_answer_ends_at_its_limit_its_stop_or_its_end() -> None:
    assert texts(2, (), "a", "b", "c") == "ab|length"
    assert texts(None, ["b"], "ab", "c") == "a|stop"
    assert texts(5, ["cd"], "a", "c") == "ac|stop"
    assert texts(5, (), "a", Token("b", finish_reason="content_filter"), "c") == "ab|content_filter"
    counted = AnswerChoice(None, StopSequences(()))
    for one in ("a", Token("bc", count=2), Usage(prompt_tokens=9)):
        counted.add(one)
    assert counted.usage == (9, 3)
    with pytest.raises(TypeError, match="gives str, Token, ToolCall or Usage, but one gave int"):
        counted.add(5)
    with pytest.raises(ValueError, match="finish_reason must be one of"):
        counted.add(Token("a", finish_reason="tired"))


# ---- bodies ----------------------------------------------------------------------------------------


def chat(**more: Any) -> ChatRequest:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], **more}
    return parse_request(ChatRequest, json.dumps(body).encode(), {})


def test_nulls_are_what_is_not_said() -> None:
    members = [
        "stop",
        "n",
        "stream",
        "max_tokens",
        "temperature",
        "logprobs",
        "stream_options",
        "tools",
        "seed",
    ]
    assert chat(**dict.fromkeys(members)) == chat()
    assert (chat().n, chat().stop, chat().token_limit) == (1, (), None)


def test_messages_in_parts() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].text == "ab"
    image = chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])
    with pytest.raises(BadRequest, match="messages: this model reads text, not image_url"):
        _ = image.messages[0].text
    assert image.conversation()[0]["content"][0]["type"] == "image_url"


def test_each_answer_has_one_prompt_and_a_seed_of_its_own() -> None:
    body = b'{"model": "m", "prompt": ["a", "b"], "n": 2, "seed": 5}'
    each = request_for_each_answer(parse_request(CompletionRequest, body, {}))
    found = [(one.prompt, one.seed, one.n) for one in each]
    assert found == [("a", 5, 1), ("a", 6, 1), ("b", 5, 1), ("b", 6, 1)]


PROMPT = "prompt: expected a string, a list of strings"
COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({}, "prompt: field required"),
    ({"prompt": []}, PROMPT),
    ({"prompt": ["a", [1]]}, PROMPT),
    ({"best_of": 2}, "best_of: all generated answers are returned"),
    ({"prompt": ["a"] * 200, "n": 2}, "prompt: expected at most 256 answers"),
    ({"prompt": [1], "echo": True}, "echo: only a prompt of text"),
    ({"prompt": "a" * 40_000, "echo": True, "n": 128}, "echo: expected at most 4194304 "),
    ({"stop": ["b", "c" * 1025]}, "stop: expected at most 1024 char"),
    ({f"x{i}": 0 for i in range(257)}, "expected at most 256 mem"),
    ({"temperature": ["long"] * 99}, "temperature: expected a number, given a list"),
    ({"logit_bias": {"k" * 999: "x"}}, f"logit_bias.{'k' * 64}: expected a number"),
    ({"model": "m" * 129}, "model: expected at most 128 char"),
    ({"logprobs": 6}, "logprobs: expected at most 5, given 6"),
]
EMBEDDINGS: list[tuple[dict[str, Any], str]] = [
    ({"input": ["a"] * 2049}, "input: expected at most 2048 of them, given 2049"),
    ({"input": [True]}, "input: expected a string"),
    ({"encoding_format": "hex"}, "encoding_format: expected 'float' or 'base64', given"),
    ({"dimensions": 0}, "dimensions: expected at least 1, given 0"),
    ({"input": ["a", ""]}, "input: expected texts that are not empty"),
]


@pytest.mark.parametrize(
    ("kind", "member", "more", "text"),
    [
        *((CompletionRequest, "prompt", *one) for one in COMPLETIONS),
        *((EmbeddingRequest, "input", *one) for one in EMBEDDINGS),
    ],
)
def test_a_wrong_body(kind: Any, member: str, more: dict[str, Any], text: str) -> None:
    body = {"model": "m", **({member: "a"} if more else {}), **more}
    with pytest.raises(BadRequest) as found:
        parse_request(kind, json.dumps(body).encode(), {})
    assert str(found.value).startswith(text)
    assert len(str(found.value)) < 300


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
KINDS = 'expected the type "function" or "custom"'
CHOICES = 'expected "none", "auto", "required" or an object'
NAMED = 'expected "function" to be an object with a name'
CUSTOM = {"type": "custom", "custom": {"name": "sing"}}


FORMAT = 'response_format: expected the type "text", "json_object" or "json_schema", given "yaml"'
BIAS = "logit_bias: expected numbers of tokens with a bias from -100 to 100, given"


def assistant(call: Any) -> dict[str, Any]:
    return {"messages": [{"role": "assistant", "tool_calls": [call]}]}


def tool(function: dict[str, Any]) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"tools": [TOOL, {"type": "foo"}]}, f'tools.1: {KINDS}, given "foo"'),
        ({"tools": [{}]}, f"tools.0: {KINDS}, given null"),
        ({"tools": [{"type": "function"}]}, f"tools.0: {NAMED}"),
        (tool({"name": ""}), f"tools.0: {NAMED}"),
        (tool({"name": "f", "parameters": "x"}), 'tools.0: expected "parameters" to be an object'),
        ({"tools": ["f"]}, 'tools.0: expected an object, given "f"'),
        ({"tool_choice": "foo"}, f'tool_choice: {CHOICES}, given "foo"'),
        ({"tool_choice": {"type": "foo"}}, f'tool_choice: {KINDS}, given "foo"'),
        ({"tool_choice": {"type": "function"}}, f"tool_choice: {NAMED}"),
        ({"response_format": {"type": "yaml"}}, FORMAT),
        ({"response_format": "json"}, 'response_format: expected an object, given "json"'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
            'response_format: expected "json_schema" to be an object with a schema',
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]},
            'messages.0.content: expected each part of the type "text" to have a text',
        ),
        (assistant({"type": "function", "function": {}}), f"messages.0.tool_calls.0: {NAMED}"),
        ({"logit_bias": {"seven": 1}}, f'{BIAS} "seven": 1.0'),
        ({"logit_bias": {"7": 101}}, f'{BIAS} "7": 101.0'),
    ],
)
def test_a_wrong_member_is_refused_by_name_whatever_the_model_does(more: dict[str, Any], text: str) -> None:
    with pytest.raises(BadRequest) as found:
        chat(**more)
    assert str(found.value) == text


def test_tools_formats_and_calls_of_openais_api_are_accepted() -> None:
    for choice in (None, "none", "auto", "required", TOOL, CUSTOM, {"type": "allowed_tools"}):
        assert chat(tools=[TOOL, CUSTOM], tool_choice=choice).tools == [TOOL, CUSTOM]
    chat(**assistant({"id": "c", "type": "function", "function": {"name": "f", "arguments": ""}}))
    parts = [{"type": "text", "text": ""}, {"type": "image_url", "image_url": {"url": "x"}}]
    chat(messages=[{"role": "user", "content": parts}], logit_bias={"7": -100})
    assert chat(response_format=None).answer_schema is None
    assert chat(response_format={"type": "text"}).answer_schema is None
    assert chat(response_format={"type": "json_object"}).answer_schema == {"type": "object"}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}
    assert chat(response_format=schema).answer_schema == {"type": "array"}


def test_the_tools_of_a_chat_template() -> None:
    assert chat(tools=[TOOL]).template_tools() == [TOOL]
    assert chat(tools=[TOOL], tool_choice="none").template_tools() is None
    for more, member in (({"tool_choice": "required"}, "tool_choice"), ({"tools": [CUSTOM]}, "tools")):
        with pytest.raises(BadRequest, match=rf"^{member}: "):
            chat(**more).template_tools()


SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    SCALARS | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
MEMBERS = st.sampled_from([*ChatRequest.model_fields, "prompt", "input", "suffix", "echo", "dimensions"])


KINDS_OF_REQUESTS = st.sampled_from([ChatRequest, CompletionRequest, EmbeddingRequest])


@given(KINDS_OF_REQUESTS, st.dictionaries(MEMBERS, JSON, max_size=4))
def test_any_body_is_read_or_refused_with_a_sentence(kind: Any, more: dict[str, Any]) -> None:
    whole = {"messages": [{"role": "user"}], "prompt": "p", "input": "i", "model": "m", **more}
    refused = ""
    try:
        parse_request(kind, json.dumps(whole).encode(), {})
    except BadRequest as error:
        refused = str(error)
    assert "\n" not in refused


# ---- the front's part ------------------------------------------------------------------------------


def model(*, is_openai: bool = True, size: int = 0) -> ModelSpec:
    return ModelSpec(name="m", inputs=(), outputs=(), max_batch_size=size, openai=is_openai)


def request_of(spec: ModelSpec, body: bytes) -> OpenAIInferRequest:
    asked = read_body([body])
    return OpenAIInferRequest(spec, "chat", b"".join(asked.parts), streams=asked.streams)


@given(JSON, st.binary(max_size=20))
def test_the_front_reads_where_a_body_goes_and_passes_it_on(document: Any, noise: bytes) -> None:
    for body in (json.dumps(document).encode(), noise):
        with pytest.raises(InvalidArgument):
            read_body([body])
    body = json.dumps({"model": "m", "stream": True, "more": document}).encode()
    request = request_of(model(), body)
    assert (request.streams, request.parameters) == (True, {"endpoint": "chat"})
    assert bytes(request.inputs[0].data) == len(body).to_bytes(4, "little") + body  # type: ignore[arg-type]
    assert request_of(model(size=4), body).inputs[0].shape == (1, 1)
    with pytest.raises(NotFound):
        checked_openai_spec(model(is_openai=False))


TEXTS = st.text() | st.text('\\"u{[,:', max_size=6) | st.just("x" * 2000) | st.just("\\" * 70_000)
TREES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(TREES, st.booleans(), st.integers(65_400, 65_600))
def test_the_outline_of_a_body_has_its_own_members(tree: Any, ascii_: bool, padding: int) -> None:
    document = {"pad": "p" * padding, "model": "m", "more": tree, "stream": True}
    text = json.dumps(document, ensure_ascii=ascii_).encode("utf-8", "replace")
    outlined = json.loads(outline_json([text]))
    assert list(outlined) == list(document)
    assert (outlined["model"], outlined["stream"]) == ("m", True)
    if not isinstance(tree, str | dict | list):
        assert outlined["more"] == tree


def test_many_values_are_refused_and_a_long_text_is_one() -> None:
    text = json.dumps({"model": "m", "prompt": "0,:[]{}" * 500_000}).encode()
    assert read_body([text]).model == "m"
    for values in (b"0,", b"[],", b'"",', b'{"":0},', b'"'):
        with pytest.raises(ResourceExhausted, match="more values than expected, at most 131072"):
            read_body([b'{"model": "m", "prompt": [', values * 300_000, b"0]}"])
    with pytest.raises(ResourceExhausted, match="more than 4194304 bytes beside its texts"):
        read_body([b'{"model": "m", "prompt": ', b"1" * (5 << 20), b"}"])


def test_errors_have_openais_form_and_statuses() -> None:
    failures = (InvalidArgument("n: too many"), QueueFull("full"), Unavailable("x"))
    told = [errors.openai_failure(one) for one in failures]
    assert [one.head.status for one in told] == [400, 429, 503]
    assert [(b"retry-after", b"1") in one.head.headers for one in told] == [False, True, True]
    error = {"message": "n: too many", "type": "invalid_request_error", "param": "n", "code": None}
    assert json.loads(told[0].body)["error"] == error
    again = request_error(inner_code(QueueFull("full")), "full")
    assert isinstance(again, QueueFull), "a full queue is one in another process too"


# ---- callables -------------------------------------------------------------------------------------


def of_chat(request: ChatRequest) -> str:
    return request.messages[0].text


def of_both(request: ChatRequest | CompletionRequest) -> str:
    return request.model


class OfTexts:
    def embed(self, texts: list[str]) -> Any:
        return np.array([[len(one)] for one in texts], np.float32)


class OfRequests:
    def embed(self, requests: list[EmbeddingRequest]) -> Any:
        return [np.zeros((len(one.inputs), 2)) for one in requests]


def test_what_a_callable_answers() -> None:
    assert list(handlers_of(of_chat)) == [OpenAIEndpoint.CHAT]
    assert list(handlers_of(of_both)) == [OpenAIEndpoint.CHAT, OpenAIEndpoint.COMPLETIONS]
    assert handlers_of(OfTexts())[OpenAIEndpoint.EMBEDDINGS].argument is HandlerArgument.TEXTS
    assert handlers_of(OfRequests())[OpenAIEndpoint.EMBEDDINGS].argument is HandlerArgument.REQUESTS
    with pytest.raises(TypeError, match="needs a method chat, complete or embed"):
        handlers_of(lambda requests: requests)


class Unsaid:
    openai = True

    def embed(self, texts: list[str]) -> Any:
        return np.zeros((len(texts), 2))


class Refused(OfTexts):
    openai = False

    def chat(self, request: ChatRequest) -> str:
        return ""


def test_a_callable_is_for_openai_by_its_types_or_its_word() -> None:
    for one in (of_chat, of_both, OfRequests, OfRequests(), Unsaid):
        said = declaration(one, "one", {})
        assert (said["openai"], said["decoupled"], said["inputs"][0]["name"]) == (True, True, "request")
    for one in (Refused, lambda requests: requests):
        assert "openai" not in declaration(one, "one", {}, by_types=False)


def bound(infer_func: Any, **more: Any) -> ModelSpec:
    given_ = {"inputs": None, "outputs": None, "config": None, **more}
    return model_spec("m", infer_func, model_version=1, strict=True, isolation="process", **given_)


def test_a_bound_callable_is_for_openai_by_its_types_or_its_config() -> None:
    for spec in (bound(of_chat), bound(OfTexts(), config=ModelConfig(openai=True))):
        assert (spec.openai, spec.decoupled, spec.max_batch_size) == (True, True, 0)
        assert spec.instances[0].source["adapter"] == "gpuserve.openai.adapter:adapt_callable"
    batched = ModelConfig(openai=True, batching=Batching(), max_batch_size=8)
    assert bound(OfTexts(), config=batched).max_batch_size == 8
    named = ModelConfig(openai=True, openai_names=["x", "y"])  # type: ignore[arg-type]  # a list will do
    assert list(bound(of_chat, config=named).openai_names) == ["x", "y"]
    with pytest.raises(BadModelConfig, match="inputs do not go with openai"):
        bound(of_chat, inputs=[Tensor(name="x", dtype="int8", shape=(1,))], config=batched)
    with pytest.raises(BadModelConfig, match="openai_names must be"):
        bound(of_chat, config=ModelConfig(openai=True, openai_names="x"))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ("inputs: [{name: x, dtype: int8, shape: [1]}]", "inputs do not go with openai"),
        ("decoupled: false", "decoupled: false does not go with openai"),
        ("response_cache: true", "response_cache does not go with decoupled"),
        ("sequence_batching: {}", "sequence_batching does not go with openai"),
        ("openai: maybe", "expected true or false, given the string 'maybe'"),
    ],
)
def test_what_does_not_go_with_openai_is_told_with_its_place(tmp_path: Path, more: str, text: str) -> None:
    path = tmp_path / "config.yaml"
    entry = "name: m\n    callable: os:getcwd"
    openai = "" if more.startswith("openai") else "\n    openai: true"
    path.write_text(f"models:\n  - {entry}{openai}\n    {more}\n")
    with pytest.raises(ConfigProblems) as found:
        load_file(str(path), {})
    assert text in str(found.value)
    assert f"{path}:" in str(found.value)


def asked(*bodies: Any) -> list[Request]:
    return [Request({"request": np.array([[json.dumps(one).encode()]], dtype=object)}) for one in bodies]


def chats_with(*contents: str, **more: Any) -> list[Request]:
    messages = ([{"role": "user", "content": one}] for one in contents)
    return asked(*({"model": "m", "messages": one, **more} for one in messages))


@pytest.mark.parametrize("made", [OfTexts, OfRequests])
def test_a_batch_of_embeddings_in_which_one_is_wrong(made: Any) -> None:
    good, tokens = {"model": "m", "input": ["a", "b"]}, {"model": "m", "input": [1], "dimensions": 0}
    first, refused, last = adapt_callable(made())(asked(good, tokens, good))
    assert isinstance(refused, BadRequest)
    for one in (first, last):
        assert len(json.loads(one["response"].item())["data"]) == 2


async def test_a_batch_of_chats_in_which_one_fails() -> None:
    async def chats(request: ChatRequest) -> str:
        if request.messages[0].text == "bad":
            raise BadRequest("no")
        return request.messages[0].text

    rounds = [one async for one in adapt_callable(chats)(chats_with("a", "bad", "b"))]
    [refused] = [one[1] for one in rounds if one[1] is not None]
    assert isinstance(refused, BadRequest)
    for at, content in ((0, "a"), (2, "b")):
        [answer] = [json.loads(one[at]["response"].item()) for one in rounds if one[at] is not None]
        assert answer["choices"][0]["message"]["content"] == content


async def test_an_answer_that_is_gathered_has_a_limit() -> None:
    closed = []

    def endless(request: ChatRequest) -> Iterator[str]:
        try:
            while True:
                yield "x" * (1 << 20)
        finally:
            closed.append(request.n)

    async def answers_to(n: int, **more: Any) -> Any:
        async with aclosing(adapt_callable(endless)(chats_with("x", **more))) as answers:
            return [(await anext(answers))[0] for _ in range(n)]

    [refused] = await answers_to(1)
    assert str(refused).startswith("stream: the answer is over the limit of 67108864 characters")
    assert closed == [1]
    assert len(await answers_to(100, stream=True)) == 100


async def test_streams_are_merged_as_they_come_and_closed_together() -> None:
    closed = []

    async def stream(name: str, count: int) -> AsyncGenerator[str]:
        try:
            for number in range(count):
                await asyncio.sleep(0)
                yield f"{name}{number}"
        finally:
            closed.append(name)

    async def all_of_them() -> list[str]:
        return [one async for _, one in merge_streams([stream("a", 2), stream("b", 3)])]

    assert sorted(await all_of_them()) == ["a0", "a1", "b0", "b1", "b2"]
    both = merge_streams([stream("c", 9), stream("d", 9)])
    await anext(both)
    await both.aclose()
    assert sorted(closed) == ["a", "b", "c", "d"]


async def test_whatever_a_call_gave_is_given_one_by_one() -> None:
    async def awaited() -> list[str]:
        return ["a", "b"]

    for result in (iter(["a", "b"]), awaited(), ["a", "b"], ("a", "b")):
        assert [one async for one in each_value(result)] == ["a", "b"]
    assert [one async for one in each_value("whole")] == [Token("whole", 0)]


# ---- vectors ---------------------------------------------------------------------------------------


def embedding(**more: Any) -> EmbeddingRequest:
    body = {"model": "m", "input": ["a", "b"], **more}
    return parse_request(EmbeddingRequest, json.dumps(body).encode(), {})


def vectors_of(request: EmbeddingRequest, vectors: Any) -> list[Any]:
    return [one["embedding"] for one in json.loads(embedding_document(request, vectors))["data"]]


def test_vectors_are_written_in_both_encodings() -> None:
    vectors = np.array([[1.5, -2.0], [0.0, 3.0]], np.float64)
    assert vectors_of(embedding(), vectors) == [[1.5, -2.0], [0.0, 3.0]]
    coded = vectors_of(embedding(encoding_format="base64"), vectors)
    read = [np.frombuffer(base64.b64decode(one), "<f4").tolist() for one in coded]
    assert read == [[1.5, -2.0], [0.0, 3.0]]


def test_shorter_vectors_have_length_1_and_longer_ones_are_refused() -> None:
    vectors = np.array([[3.0, 4.0, 9.0], [0.0, 0.0, 1.0]])
    assert vectors_of(embedding(dimensions=2), vectors) == [pytest.approx([0.6, 0.8]), [0, 0]]
    with pytest.raises(BadRequest, match="dimensions: this model's vectors have 3, given 4"):
        embedding_document(embedding(dimensions=4), vectors)


def test_vectors_that_do_not_fit_their_inputs() -> None:
    with pytest.raises(ValueError, match="expected 2 vectors, one for each input, got 3"):
        embedding_document(embedding(), np.zeros((3, 2)))
    with pytest.raises(ValueError, match="expected vectors of shape"):
        embedding_document(embedding(), np.zeros(2))
    several = [embedding(), embedding(input=[[7], [8, 9]])]
    parts = split_embeddings(np.zeros((4, 2)), several)
    assert [(len(one.vectors), one.prompt_tokens) for one in parts] == [(2, 0), (2, 3)]
    parts = split_embeddings(Embeddings(np.zeros((4, 2)), [1, 2, 3, 4]), several)
    assert [one.prompt_tokens for one in parts] == [3, 7]
    with pytest.raises(ValueError, match="expected 4 numbers of tokens, one for each input, got 1"):
        split_embeddings(Embeddings(np.zeros((4, 2)), 10), several)


def test_a_decisive_member_is_honoured_or_refused() -> None:
    def honoured(honours: tuple[str, ...], **more: Any) -> None:
        require_honoured(chat(**more), honours)

    neutral = {"tools": [], "response_format": {"type": "text"}, "logprobs": False, "frequency_penalty": 0.0}
    honoured((), temperature=0.5, top_k=3, modalities=["text"], **neutral)
    for name, value in {"tools": [TOOL], "functions": [{}], "logprobs": True, "presence_penalty": 1}.items():
        honoured((name,), **{name: value})
        with pytest.raises(BadRequest, match=f"{name}: this model does not honour it"):
            honoured((), **{name: value})
    completion = parse_request(CompletionRequest, b'{"model": "m", "prompt": "p", "logprobs": 0}', {})
    with pytest.raises(BadRequest, match="logprobs: this model"):
        require_honoured(completion, ())
    with pytest.raises(TypeError, match="honours has 'tool', expected some of tools, "):
        honoured_members(SimpleNamespace(honours=("tool",)))
