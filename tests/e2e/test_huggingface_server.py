"""Folders of Hugging Face behind a server, against transformers itself on the same folders."""

from __future__ import annotations

import json
import queue
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_models
from config_file import served
from exploring import variants
from optional_packages import needs
from serving import Addresses
from tritonclient.grpc import InferenceServerClient, InferInput, InferResult
from tritonclient.utils import InferenceServerException

pytestmark = needs("torch", "transformers")
TEXTS = ("a good day", "the bad night", "Anna lives in Bonn", "great great great day")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("huggingface")


@pytest.fixture(scope="module", params=variants(1, 2))
def count(request: pytest.FixtureRequest) -> int:
    """How many instances each model has."""
    return int(request.param)


@pytest.fixture(scope="module")
def server(folder: Path, count: int) -> Iterator[Addresses]:
    tiny_models.text_classifier(folder / "mood")
    tiny_models.writer(folder / "writer")
    models = [
        {
            "name": name,
            "callable": f"{name}/",
            "kwargs": {"shared_weights": True},
            "instances": [{"device": "cpu", "count": count}],
        }
        for name in ("mood", "writer")
    ]
    with served(folder, models) as addresses:
        yield addresses


@pytest.fixture
def client(server: Addresses) -> Iterator[InferenceServerClient]:
    with InferenceServerClient(server.grpc) as connection:
        yield connection


def texts(name: str, *values: str) -> InferInput:
    tensor = InferInput(name, [len(values), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[one.encode()] for one in values], dtype=object))
    return tensor


def written(client: InferenceServerClient, *prompts: str, **parameters: Any) -> list[InferResult]:
    """The responses to a request with these prompts."""
    came: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: came.put(error or result))
    try:
        client.async_stream_infer(
            "writer", [texts("prompt", *prompts)], parameters=parameters, enable_empty_final_response=True
        )
        results = []
        while True:
            result = came.get(timeout=60)
            if isinstance(result, InferenceServerException):
                raise result
            response = result.get_response()
            if response.outputs:
                results.append(result)
            if response.parameters["triton_final_response"].bool_param:
                return results
    finally:
        client.stop_stream()


def joined(results: list[InferResult], row: int = 0) -> str:
    return b"".join(one.as_numpy("text")[row, 0] for one in results).decode()


def test_the_instances_have_one_copy_of_the_weights(server: Addresses, count: int) -> None:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics") as page:
        lines = page.read().decode().splitlines()
    for name in ("mood", "writer"):
        labels = f'{{device="cpu",weights="{name}"}}'
        assert f"gpuserve_shared_weights_instances{labels} {count}.0" in lines


def test_texts_have_the_classes_that_the_pipeline_gives(client: InferenceServerClient, folder: Path) -> None:
    from transformers import pipeline

    expected = pipeline("text-classification", model=str(folder / "mood"))(list(TEXTS))
    answer = client.infer("mood", [texts("text", *TEXTS)])
    assert [one.decode() for one in answer.as_numpy("label")[:, 0]] == [one["label"] for one in expected]
    assert np.allclose(answer.as_numpy("score")[:, 0], [one["score"] for one in expected], atol=1e-6)
    assert np.allclose(answer.as_numpy("scores").sum(axis=1), 1, atol=1e-6)


def test_a_text_longer_than_the_model_takes_is_cut(client: InferenceServerClient) -> None:
    whole, cut = client.infer("mood", [texts("text", "good " * 500, "good " * 30)]).as_numpy("scores")
    assert np.allclose(whole, cut, atol=1e-6)


def test_what_is_no_text_is_the_mistake_of_its_client(client: InferenceServerClient) -> None:
    tensor = InferInput("text", [1, 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[b"\xff"]], dtype=object))
    with pytest.raises(InferenceServerException, match="Input 'text' must be text in UTF-8") as refused:
        client.infer("mood", [tensor])
    assert refused.value.status() == "StatusCode.INVALID_ARGUMENT"


def test_text_comes_piece_by_piece_and_is_what_transformers_writes(
    client: InferenceServerClient, folder: Path
) -> None:
    results = written(client, "It was", max_new_tokens=24)
    assert joined(results) == tiny_models.generated(folder / "writer", "It was", 24)
    assert len(results) > 1
    assert sum(int(one.as_numpy("tokens")[0, 0]) for one in results) == 24
    assert [one.as_numpy("finish_reason")[0, 0] for one in results] == [b""] * (len(results) - 1) + [
        b"length"
    ]


def test_rows_of_different_length_are_written_together(client: InferenceServerClient, folder: Path) -> None:
    prompts = ("a", "a much longer prompt", "mid")
    results = written(client, *prompts, max_new_tokens=12)
    for row, prompt in enumerate(prompts):
        assert joined(results, row) == tiny_models.generated(folder / "writer", prompt, 12)


def test_a_seed_gives_the_same_text_again(client: InferenceServerClient) -> None:
    asked = {"max_new_tokens": 30, "temperature": 0.9, "top_k": 20, "seed": 11}
    first, again = (joined(written(client, "Once", **asked)) for _ in range(2))
    other = joined(written(client, "Once", **{**asked, "seed": 12}))
    beside = written(client, "x", "Once", **asked)
    assert first == again == joined(beside, 1)
    assert other != first


@pytest.mark.parametrize(
    ("prompt", "parameters", "said"),
    [
        ("a", {"temperature": -1}, "Parameter 'temperature' must be a number from 0 to 100"),
        ("a" * 96, {}, "the prompt has 96 tokens, and the model takes 96"),
        ("", {}, "the prompt has no token"),
    ],
)
def test_a_wrong_request_is_told_what_is_wrong(
    client: InferenceServerClient, prompt: str, parameters: dict[str, Any], said: str
) -> None:
    with pytest.raises(InferenceServerException) as refused:
        written(client, prompt, **parameters)
    assert said in str(refused.value)


def test_generate_stream_gives_events(server: Addresses) -> None:
    body = {"prompt": "It was", "parameters": {"max_new_tokens": 3}}
    url = f"http://{server.http}/v2/models/writer/generate_stream"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())) as answer:
        events = [json.loads(line.removeprefix(b"data: ")) for line in answer if line.startswith(b"data: ")]
    assert events[-1]["finish_reason"] == "length"
    assert sum(one["tokens"] for one in events) == 3
