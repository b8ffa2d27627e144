"""``runtime: vllm``, on a stand-in for vLLM's interface: which engine is made, and what it is asked."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import gpuserve
from config_file import write_config
from exploring import variants
from optional_packages import needs
from processes import wait_until
from serving import GPUSERVE, JSON_LOG, Addresses, serving

pytestmark = needs("pydantic")
STAND_IN = Path(__file__).resolve().parents[1] / "vllm_stand_in"
SLOW = pytest.mark.thorough


def entry(folder: Path, **more: Any) -> dict[str, Any]:
    (folder / "writer").mkdir(exist_ok=True)
    (folder / "writer" / "config.json").write_text("{}")
    kwargs = {"loras": {"pirate": "pirate-lora"}, "max_model_len": 100}
    return {
        "name": "writer",
        "callable": "./writer",
        "runtime": "vllm",
        "openai": True,
        "kwargs": kwargs,
        **more,
    }


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("vllm") / "record"


@pytest.fixture(scope="module", params=variants(1, 2))
def server(request: pytest.FixtureRequest, record: Path) -> Iterator[Addresses]:
    record.unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(STAND_IN))
        patch.setenv("VLLM_RECORD", str(record))
        config = write_config(
            record.parent, [entry(record.parent)], host="127.0.0.1", ingress_processes=request.param
        )
        with serving(GPUSERVE, "serve", str(config), *JSON_LOG) as addresses:
            yield addresses
    assert record.read_text().splitlines()[-1] == "shutdown"


def ask(server: Addresses, path: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"http://{server.http}/v1/{path}", data)
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


def chat(text: str, model: str = "writer", **more: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": text}], **more}


def test_an_engine_answers_chats_and_completions(server: Addresses, record: Path) -> None:
    assert record.read_text().splitlines()[0] == "model writer lora True length 100"
    answer = ask(server, "chat/completions", chat("one two three"))
    (choice,) = answer["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("one two three", "stop")
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (13, 3)
    answer = ask(server, "completions", {"model": "writer", "prompt": "a b c", "max_tokens": 2})
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("a b", "length")


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1]}}}, {"enum": [1]}),
    ],
)
def test_the_engine_gets_the_schema_of_a_response_format(
    server: Addresses, response_format: dict[str, Any], schema: dict[str, Any]
) -> None:
    answer = ask(server, "chat/completions", chat("one", response_format=response_format))
    assert json.loads(answer["choices"][0]["message"]["content"]) == schema


def test_an_adapter_is_a_model_of_its_name(server: Addresses) -> None:
    assert [one["id"] for one in ask(server, "models")["data"]] == ["pirate", "writer"]
    assert ask(server, "models/pirate")["id"] == "pirate"
    answer = ask(server, "chat/completions", chat("ahoy", "pirate"))
    assert (answer["model"], answer["choices"][0]["message"]["content"]) == ("pirate", "pirate:ahoy")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (chat("x" * 101), "The prompt has 101 tokens"),
        (chat("x", top_k=-7), "top_k must be 0"),
        (chat("x", "nobody"), "unknown model"),
        (chat("x", logprobs=True), "does not honour"),
        (chat("x", tool_choice="required"), "a call cannot be promised"),
    ],
)
def test_a_request_that_the_engine_refuses_is_the_clients_error(
    server: Addresses, body: dict[str, Any], text: str
) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        ask(server, "chat/completions", body)
    assert refused.value.code in {400, 404}
    assert text in refused.value.read().decode()


def test_the_engine_aborts_the_request_of_a_client_that_leaves(server: Addresses, record: Path) -> None:
    before = record.read_text().count("abort")
    body = json.dumps(chat("begins endless", stream=True)).encode()
    request = urllib.request.Request(f"http://{server.http}/v1/chat/completions", body)
    with urllib.request.urlopen(request, timeout=20) as answer:
        assert b"begins" in answer.readline()
    wait_until(lambda: record.read_text().count("abort") == before + 1, "the engine aborts the request")


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"openai": False}, "runtime vllm serves OpenAI's clients: expected openai: true"),
        pytest.param(
            {"callable": "double.py:double"}, "runtime goes with a folder of Hugging Face", marks=SLOW
        ),
        pytest.param({"runtime": "vlm"}, "vllm", marks=SLOW),
        pytest.param(
            {"runtime": None, "openai": False, "openai_names": ["x"]},
            "has no effect without openai: true",
            marks=SLOW,
        ),
        pytest.param({}, "pip install vllm", marks=SLOW),
    ],
)
def test_a_wrong_runtime_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], text: str
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)  # the stand-in, if the server still runs
    config = write_config(tmp_path, [entry(tmp_path, **changes)])
    done = gpuserve("check", str(config))
    assert done.status != 0
    assert text in done.stderr
