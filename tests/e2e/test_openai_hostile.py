"""OpenAI's endpoints of real servers, and requests that are small for what they cost."""

from __future__ import annotations

import concurrent.futures
import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from config_file import write_config
from ingress import INGRESS_PROCESSES
from serving import GPUSERVE, Addresses, serving

TIMEOUT_S = 30.0
MODELS = Path(__file__).resolve().parents[1] / "models"
MIB = 1 << 20


def entry(name: str, attribute: str) -> dict[str, Any]:
    return {"name": name, "callable": f"{MODELS / 'openai_models.py'}:{attribute}", "openai": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    made = tmp_path_factory.mktemp("openai")
    places = {f"OPENAI_{one}": str(made / one) for one in ("CLOSED_AT", "GATE")}
    os.environ |= places
    yield made
    for one in places:
        del os.environ[one]


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Addresses]:
    models = [entry("talker", "Talker"), entry("gated", "gated")]
    settings = {"host": "127.0.0.1", "max_arena_nbytes": 30 * MIB}
    with serving(GPUSERVE, "serve", str(write_config(folder, models, **settings))) as addresses:
        yield addresses


@pytest.fixture
def client(server: Addresses) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"http://{server.http}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S
    ) as made:
        yield made


def connected(server: Addresses) -> socket.socket:
    host, _, port = server.http.rpartition(":")
    return socket.create_connection((host, int(port)), TIMEOUT_S)


def post(path: str, nbytes: int) -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {nbytes}\r\n\r\n".encode()


def answer(reader: Any) -> tuple[int, dict[str, Any]]:
    """The status of the next answer of a connection, and its document."""
    status = int(reader.readline().split()[1])
    headers = {}
    while (line := reader.readline().strip()) != b"":
        name, _, value = line.partition(b": ")
        headers[name.lower()] = value
    return status, json.loads(reader.read(int(headers[b"content-length"])))


@pytest.mark.parametrize("ingress", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_without_a_model_of_openai_nothing_of_a_body_is_waited_for(tmp_path: Path, ingress: int) -> None:
    tensor = {"dtype": "bytes", "shape": [-1]}
    model = {
        "name": "tensors",
        "callable": f"{MODELS / 'v2_models.py'}:echo",
        "inputs": [{"name": "x", **tensor}],
        "outputs": [{"name": "y", **tensor}],
    }
    config = write_config(tmp_path, [model], host="127.0.0.1", ingress_processes=ingress)
    with (
        serving(GPUSERVE, "serve", str(config)) as server,
        connected(server) as sock,
        sock.makefile("rb") as reader,
    ):
        for path in ("chat/completions", "completions", "embeddings"):
            sock.sendall(post(f"/v1/{path}", MIB))  # the head alone
            status, document = answer(reader)
            assert (status, document["error"]["code"]) == (404, "model_not_found")
            assert "no model of this server is for OpenAI's clients" in document["error"]["message"]
            sock.sendall(bytes(MIB))  # the connection is sound
        sock.sendall(b"GET /v2/health/live HTTP/1.1\r\nhost: x\r\naccept: application/json\r\n\r\n")
        assert answer(reader) == (200, {"live": True})


def test_a_body_that_is_announced_as_too_long_is_not_read(server: Addresses) -> None:
    with connected(server) as sock, sock.makefile("rb") as reader:
        sock.sendall(post("/v1/completions", 33 * MIB))
        status, document = answer(reader)
    assert (status, document["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("values", [b"0,", b"[],", b'"",', b'{"a":0},'])
def test_millions_of_values_are_refused(server: Addresses, values: bytes) -> None:
    body = b'{"model": "talker", "prompt": [' + values * (16 * MIB // len(values)) + b"0]}"
    with connected(server) as sock, sock.makefile("rb") as reader:
        sock.sendall(post("/v1/completions", len(body)) + body)
        status, document = answer(reader)
    assert (status, document["error"]["code"]) == (413, "request_too_large")
    assert document["error"]["message"] == "the body holds more values than expected, at most 131072"


def test_a_long_body_is_served_like_a_short_one(client: openai.OpenAI) -> None:
    url = "data:image/png;base64," + "A" * (10 * MIB)
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": 'a "text"\\'}]
    messages: Any = [{"role": "user", "content": parts}, {"role": "user", "content": 'last "\\" \u00e9'}]
    made = client.chat.completions.create(model="talker", messages=messages)
    assert made.choices[0].message.content == messages[-1]["content"]
    chunks = client.chat.completions.create(model="talker", messages=messages, stream=True)
    text = "".join([one.choices[0].delta.content or "" for one in chunks])
    assert text == messages[-1]["content"]
    prompt = "\u00e9\\\"'" * 200_000
    completed = client.completions.create(model="talker", prompt=prompt, echo=True)
    assert completed.choices[0].text == prompt + prompt.upper()
    vectors = client.embeddings.create(model="talker", input=["text " * 100] * 2048)
    assert len(vectors.data) == 2048
    with pytest.raises(openai.NotFoundError, match="unknown model: 'nothing'"):
        client.completions.create(model="nothing", prompt=prompt)


@pytest.mark.thorough
def test_long_bodies_over_http_2_and_through_ingress_processes(folder: Path, tmp_path: Path) -> None:
    config = write_config(tmp_path, [entry("talker", "Talker")], host="127.0.0.1", ingress_processes=2)
    text = "\u00e9\\\"'" * MIB

    def answers(server: Addresses, *, http2: bool) -> list[str]:
        with (
            openai.DefaultHttpxClient(http1=not http2, http2=http2) as transport,
            openai.OpenAI(
                base_url=f"http://{server.http}/v1", api_key="none", http_client=transport
            ) as asking,
        ):
            return [asking.completions.create(model="talker", prompt=text).choices[0].text for _ in range(3)]

    with (
        serving(GPUSERVE, "serve", str(config)) as server,
        concurrent.futures.ThreadPoolExecutor(4) as threads,
    ):
        several = [threads.submit(answers, server, http2=number % 2 == 1) for number in range(4)]
        assert {one for each in several for one in each.result()} == {text.upper()}


def test_long_bodies_that_are_no_json(server: Addresses) -> None:
    for body in (
        b'{"model": "talker", "prompt": "' + b"a" * MIB,
        b'{"model": "talker" "prompt"' + b" " * MIB,
    ):
        with connected(server) as sock, sock.makefile("rb") as reader:
            sock.sendall(post("/v1/completions", len(body)) + body)
            status, document = answer(reader)
        assert status == 400
        assert document["error"]["message"].startswith("the body is no JSON: ")
    for text in (b"\xff", b"\x01", b"\\x"):  # which the worker finds
        body = b'{"model": "talker", "prompt": "' + b"a" * MIB + text + b'"}'
        with connected(server) as sock, sock.makefile("rb") as reader:
            sock.sendall(post("/v1/completions", len(body)) + body)
            status, document = answer(reader)
        assert status == 400
        assert document["error"]["message"].startswith("the body is no JSON: ")


def test_what_is_asked_for_many_times_over_is_refused_before_it_is_made(client: openai.OpenAI) -> None:
    for more in ({}, {"stream": True}):
        with pytest.raises(openai.BadRequestError) as found:
            client.completions.create(model="talker", prompt="a" * 4 * MIB, echo=True, n=128, **more)  # type: ignore[call-overload]
        assert found.value.param == "echo"
        assert "expected at most 4194304 characters of prompts times n, given 536870912" in str(found.value)
    with pytest.raises(openai.BadRequestError, match="at most 1024 characters in a string, given 1025"):
        client.completions.create(model="talker", prompt="a", stop="b" * 1025)
    echoed = client.completions.create(model="talker", prompt="a" * 8192, echo=True, n=128)
    assert {one.text for one in echoed.choices} == {"a" * 8192 + "A" * 8192}


@pytest.mark.skipif(INGRESS_PROCESSES > 1, reason="each ingress process has an arena of its own")
def test_a_long_body_has_memory_of_its_model_until_its_request_is_answered(
    client: openai.OpenAI, folder: Path
) -> None:
    messages: Any = [{"role": "user", "content": "a" * 20 * MIB}]

    def ask() -> str:
        return str(
            client.chat.completions.create(model="gated", messages=messages).choices[0].message.content
        )

    held: Any = client.chat.completions.create(model="gated", messages=messages, stream=True)
    assert next(held).choices[0].delta.content == "begun"
    with concurrent.futures.ThreadPoolExecutor(1) as threads:
        with pytest.raises(openai.InternalServerError, match="memory") as found:
            threads.submit(ask).result()
        assert found.value.status_code == 503
    (folder / "GATE").touch()
    assert "".join([one.choices[0].delta.content or "" for one in held]) == " ended"
    assert ask() == "begun ended"
