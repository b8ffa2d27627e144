"""OpenAI's own client against folders of Hugging Face: what transformers writes and embeds comes to it."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import openai
import pytest
import tiny_models
from config_file import served
from optional_packages import needs
from serving import Addresses

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
pytestmark = pytest.mark.thorough
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
TOOLS = [{"type": "function", "function": {"name": "weather"}}]
CALL = '<call>{"name": "weather", "arguments": {"city": "Bonn"}}</call>'
AS_TEXT = "system: Be brief.\nuser: Hi\nassistant:"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("openai")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Addresses]:
    tiny_models.writer(folder / "writer")
    tiny_models.writer(folder / "batched", min_length=0)  # an option that only batches of generate honour
    tiny_models.encoder(folder / "encoder")
    tiny_models.caller(folder / "caller", f"Wait. {CALL}", AS_TEXT)
    names = ("writer", "batched", "encoder", "caller")
    models = [{"name": one, "callable": f"./{one}", "openai": True} for one in names]
    with served(folder, models) as addresses:
        yield addresses


@pytest.fixture
def client(server: Addresses) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0) as made:
        yield made


def response_format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "wanted", "schema": schema}}


def test_a_chat_goes_through_the_template_of_the_folder(client: openai.OpenAI, folder: Path) -> None:
    answer = client.chat.completions.create(model="writer", messages=MESSAGES, max_tokens=12)
    assert answer.choices[0].message.content == tiny_models.generated(folder / "writer", AS_TEXT, 12)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(AS_TEXT), 12)
    stream = client.chat.completions.create(model="writer", messages=MESSAGES, max_tokens=12, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == answer.choices[0].message.content
    assert len(pieces) > 4


def test_completions_of_several_prompts_have_seeds_of_their_own(client: openai.OpenAI, folder: Path) -> None:
    whole = client.completions.create(model="writer", prompt=["It was", "Once"])
    assert [one.text for one in whole.choices] == [
        tiny_models.generated(folder / "writer", prompt, 16) for prompt in ("It was", "Once")
    ]
    asked = {"model": "writer", "prompt": "It was", "n": 2, "temperature": 1, "seed": 4, "max_tokens": 20}
    first, again = (client.completions.create(**asked) for _ in range(2))
    assert [one.text for one in first.choices] == [one.text for one in again.choices]
    assert first.choices[0].text != first.choices[1].text


def test_log_probabilities_are_those_of_the_model(client: openai.OpenAI, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "writer")
    model = AutoModelForCausalLM.from_pretrained(folder / "writer")
    prompt = tokenizer(AS_TEXT, return_tensors="pt")["input_ids"]
    made = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    expected = model(made).logits[0, prompt.shape[1] - 1 : -1].log_softmax(-1).topk(3)
    asked: dict[str, Any] = {"model": "writer", "max_tokens": 6}
    likeliest = {"logprobs": True, "top_logprobs": 3}
    answer = client.chat.completions.create(messages=MESSAGES, n=2, **asked, **likeliest)
    for choice in answer.choices:
        tokens = choice.logprobs.content
        assert "".join([one.token for one in tokens]) == choice.message.content
        for one, values, top in zip(tokens, expected.values.tolist(), expected.indices.tolist(), strict=True):
            assert one.logprob == pytest.approx(values[0], abs=1e-4)
            assert [each.logprob for each in one.top_logprobs] == pytest.approx(values, abs=1e-4)
            assert [each.token for each in one.top_logprobs] == [tokenizer.decode([token]) for token in top]
    stream = client.chat.completions.create(messages=MESSAGES, stream=True, **asked, **likeliest)
    parts = [chunk.choices[0].logprobs for chunk in stream]
    streamed = [token for one in parts if one for token in one.content]
    assert [one.token for one in streamed] == [one.token for one in tokens]
    assert [one.logprob for one in streamed] == pytest.approx([one.logprob for one in tokens], abs=1e-4)
    (only,) = client.completions.create(prompt=AS_TEXT, logprobs=0, **asked).choices
    assert only.logprobs.token_logprobs == pytest.approx([one.logprob for one in tokens], abs=1e-4)
    assert only.logprobs.top_logprobs == [{}] * 6


def test_tool_calls_are_read_out_of_the_text(client: openai.OpenAI) -> None:
    def ask(**more: Any) -> Any:
        return client.chat.completions.create(model="caller", messages=MESSAGES, tools=TOOLS, **more)

    (choice,) = ask().choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Bonn"})
    assert (choice.message.content, choice.finish_reason) == ("Wait. ", "tool_calls")
    *chunks, last = list(ask(stream=True))
    calls = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or []]
    assert [(one.index, one.function.name) for one in calls] == [(0, "weather")]
    assert last.choices[0].finish_reason == "tool_calls"
    without = ask(tool_choice="none").choices[0]
    assert without.message.content == "Wait. " + CALL.removeprefix("<call>").removesuffix("</call>")
    assert without.finish_reason == "stop"
    with pytest.raises(openai.BadRequestError, match="logprobs: expected none beside tools"):
        ask(logprobs=True)


@needs("llguidance")
@pytest.mark.parametrize("model", ["writer", "batched"])
def test_json_obeys_the_schema_of_its_request_beside_other_requests(
    client: openai.OpenAI, model: str
) -> None:
    def ask(**more: Any) -> Any:
        return client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=48, **more)

    as_text = ask().choices[0].message.content
    schema = {"type": "array", "items": {"enum": ["yes", "no"]}, "minItems": 1, "maxItems": 2}
    with ThreadPoolExecutor() as pool:
        texts = [pool.submit(ask) for _ in range(3)]
        wanted = {"response_format": response_format(schema), "temperature": 1, "seed": 5, "n": 4}
        answers = pool.submit(ask, **wanted).result().choices
        assert [one.result().choices[0].message.content for one in texts] == [as_text] * 3
    ended = [json.loads(one.message.content) for one in answers if one.finish_reason == "stop"]
    assert ended, "all texts were cut at their limit"
    for one in ended:
        jsonschema.validate(one, schema)
    stream = ask(response_format={"type": "json_object"}, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream).lstrip().startswith("{")


def test_tokens_of_the_model_are_a_prompt(client: openai.OpenAI) -> None:
    tokens = tiny_models.byte_tokenizer()("It was")["input_ids"]
    by_tokens = client.completions.create(model="writer", prompt=tokens)
    assert (
        by_tokens.choices[0].text
        == client.completions.create(model="writer", prompt="It was").choices[0].text
    )
    with pytest.raises(openai.BadRequestError, match="the model has tokens below 257, given 300"):
        client.completions.create(model="writer", prompt=[1, 300])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"frequency_penalty": 1}, "frequency_penalty: this model does not honour it"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice: a call cannot be promised"),
        ({"tool_choice": "required"}, "tool_choice: a call cannot be promised"),
        pytest.param(
            {"response_format": {"type": "json_object"}, "tools": TOOLS},
            "response_format: expected none beside tools",
            marks=needs("llguidance"),
        ),
        pytest.param(
            {"response_format": response_format({"type": "no"})},
            "response_format: the schema cannot be followed: Invalid type: no",
            marks=needs("llguidance"),
        ),
        ({"extra_body": {"top_k": -1}}, "Parameter 'top_k' must be an int of at least 0"),
    ],
)
def test_what_is_not_honoured_is_refused(client: openai.OpenAI, more: dict[str, object], said: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model="writer", messages=MESSAGES, **more)
    assert said in str(refused.value)


def test_a_folder_keeps_its_own_tensors(server: Addresses, folder: Path) -> None:
    def ask(path: str, **body: Any) -> str:
        asked = urllib.request.Request(f"http://{server.http}/v2/models/{path}", json.dumps(body).encode())
        with urllib.request.urlopen(asked, timeout=30) as answer:
            return str(answer.read().decode())

    written = tiny_models.generated(folder / "writer", "It was", 5)
    events = ask("writer/generate_stream", prompt="It was", max_new_tokens=5).split("\n\n")
    pieces = [json.loads(one.removeprefix("data: ")) for one in events if one]
    assert "".join(one["text"] for one in pieces) == written
    assert pieces[-1]["finish_reason"] == "length"
    (vector,) = json.loads(ask("encoder/generate", text="hello"))["embedding"][:1]
    body = json.dumps({"model": "encoder", "input": "hello"})
    same = json.loads(json.loads(ask("encoder/generate", request=body))["response"])
    assert vector == pytest.approx(same["data"][0]["embedding"][0], abs=1e-5)
    with pytest.raises(urllib.error.HTTPError, match="400"):
        ask("encoder/generate", parameters={})


def test_embeddings_are_those_of_the_model(client: openai.OpenAI, folder: Path) -> None:
    from transformers import pipeline

    texts = ["a good day", "anna lives in bonn"]
    answer = client.embeddings.create(model="encoder", input=texts)
    expected = pipeline("feature-extraction", model=str(folder / "encoder"))(texts)
    for one, tokens in zip(answer.data, expected, strict=True):
        assert np.allclose(one.embedding, np.mean(tokens[0], axis=0), atol=1e-5)
    assert answer.usage.prompt_tokens == 5 + 6
    with pytest.raises(openai.BadRequestError, match="takes text, not tokens"):
        client.embeddings.create(model="encoder", input=[1, 2])


def test_an_endpoint_that_the_folder_is_not_for_is_not_there(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="writer", input="a")
