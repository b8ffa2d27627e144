"""OpenAI's endpoints of a real server that wants a token, asked by the official client."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from bound import free_server
from config_file import write_config
from exploring import variants
from processes import wait_until
from serving import GPUSERVE, Addresses, serving

from gpuserve import ModelConfig
from gpuserve.openai import ChatRequest

TIMEOUT_S = 20.0
TOKEN = "a-token-of-the-tests"
MODELS = Path(__file__).resolve().parents[1] / "models" / "openai_models.py"
V2_MODELS = MODELS.with_name("v2_models.py")


def entry(name: str, attribute: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "callable": f"{MODELS}:{attribute}", "openai": True, **more}


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("openai")
    os.environ |= {"OPENAI_CLOSED_AT": str(folder / "closed"), "OPENAI_GATE": str(folder / "gate")}
    yield folder
    del os.environ["OPENAI_CLOSED_AT"], os.environ["OPENAI_GATE"]


@pytest.fixture(scope="module")
def server(places: Path) -> Iterator[Addresses]:
    tensor = {"dtype": "bytes", "shape": [-1]}
    models = [
        entry("talker", "Talker"),
        entry("tools", "Tools"),
        entry("endless", "endless"),
        entry("gated", "gated", concurrency=1, queue={"max_requests": 1}),
        entry("vectors", "Vectors", max_batch_size=16, batching={"max_queue_delay_us": 200_000}),
        {
            "name": "tensors",
            "callable": f"{V2_MODELS}:echo",
            "inputs": [{"name": "x", **tensor}],
            "outputs": [{"name": "y", **tensor}],
            "max_batch_size": 4,
        },
    ]
    access = {"access_token": TOKEN, "restricted_endpoints": ["inference", "metadata"]}
    settings = {"host": "127.0.0.1", "http_header_forward_pattern": "x-tenant", **access}
    with serving(GPUSERVE, "serve", str(write_config(places, models, **settings))) as addresses:
        yield addresses


@pytest.fixture(scope="module")
def client(server: Addresses) -> Iterator[openai.OpenAI]:
    closing = {"connection": "close"}  # no test leaves one to the next
    with openai.OpenAI(
        base_url=f"http://{server.http}/v1",
        api_key=TOKEN,
        max_retries=0,
        timeout=TIMEOUT_S,
        default_headers=closing,
    ) as made:
        yield made


def said(text: str) -> list[Any]:
    return [{"role": "system", "content": "repeat"}, {"role": "user", "content": text}]


def talk(client: openai.OpenAI, text: str, **more: Any) -> Any:
    return client.chat.completions.create(model="talker", messages=said(text), **more)


def text_of(chunks: Any, index: int = 0) -> str:
    parts = [one for chunk in chunks for one in chunk.choices if one.index == index]
    return "".join(one.delta.content or "" for one in parts)


# ---- chat -----------------------------------------------------------------------------------------


def test_a_whole_message(client: openai.OpenAI) -> None:
    answer = talk(client, "hello world")
    assert (answer.object, answer.model) == ("chat.completion", "talker")
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        "hello world",
        "stop",
    )
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 4, 6)


def test_a_stream_of_chunks_under_one_id(client: openai.OpenAI) -> None:
    chunks = list(talk(client, "hello world", stream=True, stream_options={"include_usage": True}))
    assert text_of(chunks) == "hello world"
    assert len({one.id for one in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [one.choices[0].delta.role for one in chunks[1:-1]] == [None] * (len(chunks) - 2)
    reasons = [one.choices[0].finish_reason for one in chunks[:-1]]
    assert reasons == [None] * (len(chunks) - 2) + ["stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.total_tokens == 6


def test_the_bytes_of_a_stream(server: Addresses) -> None:
    body = {"model": "talker", "messages": said("hi"), "stream": True}
    headers = {"authorization": f"Bearer {TOKEN}"}
    with openai.DefaultHttpxClient() as http:
        answer = http.post(f"http://{server.http}/v1/chat/completions", json=body, headers=headers)
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(one.removeprefix("data: ")) for one in events[:-2]]
    assert [one["choices"][0]["delta"] for one in chunks] == [{"role": "assistant", "content": "hi"}, {}]
    assert not any("usage" in one for one in chunks)


def test_a_stop_sequence_across_tokens(client: openai.OpenAI) -> None:
    for stop, expected in (("o w", "hell"), (["zz", "lo", "ld"], "hel"), ("never", "hello world")):
        answer = talk(client, "hello world", stop=stop)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (expected, "stop")
        assert text_of(talk(client, "hello world", stop=stop, stream=True)) == expected


def test_a_limit_of_tokens(client: openai.OpenAI) -> None:
    for limit in ("max_tokens", "max_completion_tokens"):
        answer = talk(client, "hello world", **{limit: 2})
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("hello ", "length")
        assert answer.usage.completion_tokens == 2


def test_sampling_is_the_callables_and_each_answer_has_its_seed(client: openai.OpenAI) -> None:
    answer = talk(client, "seed", seed=7, temperature=0.5, top_p=0.25, n=3)
    assert [one.message.content for one in answer.choices] == ["7 0.5 0.25", "8 0.5 0.25", "9 0.5 0.25"]
    assert answer.usage.prompt_tokens == 2
    chunks = list(talk(client, "seed", seed=7, n=3, stream=True))
    assert [text_of(chunks, index) for index in range(3)] == ["7 None None", "8 None None", "9 None None"]


def test_members_of_other_servers_and_forwarded_headers_reach_the_callable(client: openai.OpenAI) -> None:
    assert talk(client, "extra", extra_body={"top_k": 3}).choices[0].message.content == "{'top_k': 3}"
    forwarded = talk(client, "forwarded", extra_headers={"x-tenant": "blue"})
    assert forwarded.choices[0].message.content == "blue"


def test_tools_and_a_response_format(client: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", "function": {"name": name}} for name in ("add", "subtract")]
    asked: dict[str, Any] = {"model": "tools", "messages": said("x"), "tools": tools}
    [choice] = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    calls = choice.message.tool_calls
    assert [(one.function.name, one.function.arguments) for one in calls] == [
        ("add", '{"a": 1}'),
        ("subtract", '{"a": 1}'),
    ]
    deltas = [one.choices[0].delta for one in client.chat.completions.create(**asked, stream=True)]
    parts = [one for delta in deltas for one in delta.tool_calls or []]
    assert [(one.index, one.function.name) for one in parts] == [
        (0, "add"),
        (0, None),
        (1, "subtract"),
        (1, None),
    ]
    assert "".join(one.function.arguments for one in parts) == '{"a": 1}' * 2
    answer = client.chat.completions.create(
        model="tools",
        messages=said("x"),
        response_format={"type": "json_object"},
        logprobs=True,
        top_logprobs=1,
    )
    [token] = answer.choices[0].logprobs.content
    assert (answer.choices[0].message.content, token.logprob, token.top_logprobs[0].token) == (
        "json_object",
        -0.25,
        "x",
    )


def test_the_asynchronous_client_has_many_streams_at_once(server: Addresses) -> None:
    async def one(client: openai.AsyncOpenAI, number: int) -> str:
        stream = await client.chat.completions.create(
            model="talker", messages=said(f"number {number} speaks"), stream=True
        )
        return text_of([chunk async for chunk in stream])

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"http://{server.http}/v1", api_key=TOKEN, max_retries=0
        ) as client:
            return await asyncio.gather(*[one(client, number) for number in range(12)])

    assert asyncio.run(all_of_them()) == [f"number {number} speaks" for number in range(12)]


def test_over_http_2(server: Addresses) -> None:
    with (
        openai.DefaultHttpxClient(http1=False, http2=True) as transport,
        openai.OpenAI(base_url=f"http://{server.http}/v1", api_key=TOKEN, http_client=transport) as client,
    ):
        assert text_of(talk(client, "hello", stream=True)) == "hello"
        assert talk(client, "hello").choices[0].message.content == "hello"


def test_a_client_that_leaves_closes_the_callable(client: openai.OpenAI, places: Path) -> None:
    stream: Any = client.chat.completions.create(model="endless", messages=said("x"), stream=True)
    first = [next(stream).choices[0].delta.content for _ in range(3)]
    assert first == ["on "] * 3
    (places / "closed").unlink(missing_ok=True)
    stream.close()
    wait_until((places / "closed").exists, "the callable is closed", TIMEOUT_S)


def test_one_that_waits_for_a_whole_answer_and_leaves_does_too(client: openai.OpenAI, places: Path) -> None:
    (places / "closed").unlink(missing_ok=True)
    with pytest.raises(openai.APITimeoutError):
        client.chat.completions.create(model="endless", messages=said("x"), timeout=0.2)
    wait_until((places / "closed").exists, "the callable is closed", TIMEOUT_S)


# ---- completions and embeddings --------------------------------------------------------------------


def test_completions_of_texts_and_tokens(client: openai.OpenAI) -> None:
    def texts(**more: Any) -> list[str]:
        return [one.text for one in client.completions.create(model="talker", **more).choices]

    assert texts(prompt="abc") == ["ABC"]
    assert texts(prompt=["abc", "d"], n=2, echo=True) == ["abcABC", "abcABC", "dD", "dD"]
    assert texts(prompt=[[1, 2], [3]]) == ["12", "3"]
    assert texts(prompt=[1, 2], max_tokens=1) == ["1"]
    stream = client.completions.create(model="talker", prompt=[1, 2], stream=True)
    assert [(one.choices[0].text, one.choices[0].finish_reason) for one in stream] == [
        ("1", None),
        ("2", None),
        ("", "stop"),
    ]


def test_log_probabilities_of_a_completion(client: openai.OpenAI) -> None:
    [choice] = client.completions.create(model="talker", prompt="x", logprobs=2).choices
    told = choice.logprobs
    assert (told.tokens, told.token_logprobs, told.text_offset) == (["a", "b"], [-0.5, -1.0], [0, 1])
    assert told.top_logprobs[0] == {"a": -0.5, "b": -1.5}


def test_embeddings_in_both_encodings(client: openai.OpenAI) -> None:
    for more in ({}, {"encoding_format": "float"}):
        answer = client.embeddings.create(model="talker", input=["ab", "abc"], **more)  # type: ignore[arg-type]
        assert [one.embedding for one in answer.data] == [[3, 4, 2], [3, 4, 3]]
        assert answer.usage.prompt_tokens == 5
    assert client.embeddings.create(model="talker", input=[7, 8]).data[0].embedding == [3, 4, 2]
    short = client.embeddings.create(model="talker", input="x", dimensions=2).data[0].embedding
    assert short == pytest.approx([0.6, 0.8])


def test_embeddings_of_several_clients_are_one_call(client: openai.OpenAI) -> None:
    def embedded(texts: Any) -> Any:
        answer = client.embeddings.create(model="vectors", input=texts)
        assert answer.usage.prompt_tokens == len("".join(texts))
        return [one.embedding for one in answer.data]

    asked = ["a", ["bb", "ccc"], "dddd", [1, 2]]
    with concurrent.futures.ThreadPoolExecutor(4) as threads:
        *answers, refused = [threads.submit(embedded, one) for one in asked]
        lengths = [[length for length, _ in one.result()] for one in answers]
        together = {count for one in answers for _, count in one.result()}
        assert isinstance(refused.exception(), openai.BadRequestError)
    assert lengths == [[1], [2, 3], [4]]
    assert max(together) > 2


# ---- models, errors, limits ------------------------------------------------------------------------


def test_the_models_are_those_for_openai(client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == ["endless", "gated", "talker", "tools", "vectors"]
    assert client.models.retrieve("talker").object == "model"
    for name in ("nothing", "tensors"):
        with pytest.raises(openai.NotFoundError) as found:
            client.models.retrieve(name)
        assert found.value.code == "model_not_found"


def test_a_model_that_is_not_for_openai_is_not_found(client: openai.OpenAI) -> None:
    for name in ("nothing", "tensors"):
        with pytest.raises(openai.NotFoundError) as found:
            client.chat.completions.create(model=name, messages=said("x"))
        assert (found.value.type, found.value.param, found.value.code) == (
            "invalid_request_error",
            "model",
            "model_not_found",
        )


def test_an_endpoint_that_the_model_does_not_have(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="the model answers chat, not 'completions'"):
        client.completions.create(model="tools", prompt="x")


@pytest.mark.parametrize(
    ("more", "param", "text"),
    [
        ({"temperature": 3}, "temperature", "expected at most 2, given 3"),
        ({"messages": []}, "messages", "expected a list of at least 1, given an empty list"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role", 'given "robot"'),
        (
            {"messages": [{"role": "user", "content": 5}]},
            "messages.0.content",
            "expected a string, or a list",
        ),
        ({"stop": [1]}, "stop", "expected a string or a list of strings"),
        ({"stop": ["x"] * 17}, "stop", "at most 16 strings, given 17"),
        ({"n": 0}, "n", "expected at least 1, given 0"),
        ({"max_tokens": "5"}, "max_tokens", "expected an integer"),
        ({"stream": "yes"}, "stream", "expected true or false"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "only where stream is true"),
        ({"top_logprobs": 2}, "top_logprobs", "only where logprobs is true"),
        ({"messages": said("refuse")}, "messages", "nobody says that"),
        ({"tools": [{"type": "foo"}]}, "tools.0", "expected the type"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "tools",
            "this model does not honour it",
        ),
        ({"response_format": {"type": "json_object"}}, "response_format", "does not honour"),
        ({"extra_body": {"modalities": ["text", "audio"]}}, "modalities", "does not honour"),
    ],
)
def test_a_wrong_request_names_its_member(
    client: openai.OpenAI, more: dict[str, Any], param: str, text: str
) -> None:
    with pytest.raises(openai.BadRequestError) as found:
        client.chat.completions.create(**{"model": "talker", "messages": said("x"), **more})
    assert (found.value.type, found.value.param) == ("invalid_request_error", param)
    assert text in str(found.value)


def test_bodies_that_are_none(server: Addresses) -> None:
    url, headers = f"http://{server.http}/v1", {"authorization": f"Bearer {TOKEN}"}
    with openai.DefaultHttpxClient(headers=headers) as http:
        for body, text in (
            (b"{", "no JSON"),
            (b"[]", "must be a JSON object"),
            (b"{}", "model: expected the name"),
        ):
            answer = http.post(f"{url}/chat/completions", content=body)
            assert answer.status_code == 400
            assert text in answer.json()["error"]["message"]
        for method, path, status in (("POST", "nothing", 404), ("GET", "completions", 405)):
            answer = http.request(method, f"{url}/{path}")
            assert answer.status_code == status
            assert answer.json()["error"]["code"] == "unknown_url"


def test_without_the_token_nobody_is_served(server: Addresses) -> None:
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="wrong", max_retries=0) as client:
        for ask in (client.models.list, lambda: talk(client, "x"), lambda: talk(client, "x", stream=True)):
            with pytest.raises(openai.AuthenticationError) as found:
                ask()
            assert found.value.code == "invalid_api_key"


def test_a_callable_that_raises(client: openai.OpenAI) -> None:
    for more in ({}, {"stream": True}):
        with pytest.raises(openai.InternalServerError, match="the talker broke") as found:
            talk(client, "break before", **more)
        assert found.value.type == "server_error"
    stream = talk(client, "break after", stream=True)
    assert next(stream).choices[0].delta.content == "bre"
    with pytest.raises(openai.APIError, match="the talker broke"):
        next(stream)


def test_a_full_queue_is_429(client: openai.OpenAI, places: Path) -> None:
    def ask() -> str:
        answer = client.chat.completions.create(model="gated", messages=said("x"))
        return str(answer.choices[0].message.content)

    running: Any = client.chat.completions.create(model="gated", messages=said("x"), stream=True)
    assert next(running).choices[0].delta.content == "begun"
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(ask) for _ in range(2)]  # the queue has room for one
        done, _ = concurrent.futures.wait(waiting, TIMEOUT_S, return_when=concurrent.futures.FIRST_COMPLETED)
        (refused,) = done
        error = refused.exception()
        (places / "gate").touch()
        assert text_of(running) == " ended"
        assert [one.result() for one in waiting if one is not refused] == ["begun ended"]
    assert isinstance(error, openai.RateLimitError)
    assert (error.code, error.response.headers["retry-after"]) == ("rate_limit_exceeded", "1")


def test_the_model_is_one_of_v2_as_well_and_its_requests_count(server: Addresses) -> None:
    headers = {"authorization": f"Bearer {TOKEN}"}
    body = {"model": "talker", "messages": said("hi")}
    asked = {"request": json.dumps(body), "endpoint": "chat"}
    before = successes(server)
    with openai.DefaultHttpxClient(headers=headers) as http:
        answer = http.post(f"http://{server.http}/v2/models/talker/generate", json=asked)
        document = json.loads(answer.json()["response"])
        assert document["choices"][0]["message"]["content"] == "hi"
        http.post(f"http://{server.http}/v1/chat/completions", json=body).raise_for_status()
    assert successes(server) == before + 2


def successes(server: Addresses) -> int:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=TIMEOUT_S) as page:
        lines = page.read().decode().splitlines()
    [line] = [one for one in lines if one.startswith('nv_inference_request_success{model="talker"')]
    return int(float(line.rpartition(" ")[2]))


# ---- bound by a program ----------------------------------------------------------------------------


@pytest.mark.parametrize("isolation", variants("process", "thread"))
def test_a_bound_callable(isolation: Any) -> None:
    class Bound:
        def chat(self, request: ChatRequest) -> str:
            return f"{threading.current_thread() is threading.main_thread()}"

    with free_server() as server:
        server.bind("bound", Bound(), config=ModelConfig(openai=True), isolation=isolation)  # type: ignore[arg-type]
        server.run()
        url = f"{server.addresses['http']}/v1"
        with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
            answer = client.chat.completions.create(model="bound", messages=said("x"))
    assert answer.choices[0].message.content == str(isolation == "process")
