"""Ragged inputs of a real server: requests of any length share a batch and get their own rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from processes import finished
from serving import GPUSERVE, JSON_LOG, Addresses, serving
from test_v2_inference import metric
from tritonclient.grpc import InferenceServerClient, InferInput
from tritonclient.utils import InferenceServerException

MODELS = Path(__file__).parents[1] / "models"
FORMS = ("padded", "on_the_left", "rows", "requests")
MODEL = """
  - name: {name}
    callable: {models}/ragged.py:{form}
    max_batch_size: 32
    batching: {{max_queue_delay_us: 300000, preferred_batch_sizes: [{rows}]{more}}}
    inputs: [{{name: x, dtype: float32, shape: [-1], ragged: true}}]
    outputs:
      - {{name: total, dtype: float32, shape: [1]}}
      - {{name: twice, dtype: float32, shape: [-1], ragged: true}}
      - {{name: rows, dtype: int32, shape: [1]}}
"""
SMALL, LARGE = (3, 1, 17, 300, 64, 0), (5_000, 70_000, 12, 40_000, 9_999, 1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    config = tmp_path_factory.mktemp("ragged") / "config.yaml"
    entries = [MODEL.format(name=one, models=MODELS, form=one, rows=9, more="") for one in FORMS]
    limits = {"budget": "max_batch_elements: 100", "buckets": "bucket_boundaries: [10, 100]"}
    for name, limit in limits.items():
        entries.append(MODEL.format(name=name, models=MODELS, form="rows", rows=32, more=f", {limit}"))
    images = MODEL.format(
        name="images", models=MODELS, form="rows", rows=32, more=", max_batch_elements: 100"
    )
    entries.append(images.replace("shape: [-1], ragged", "shape: [-1, -1], ragged"))
    config.write_text("models:" + "".join(entries))
    with serving(GPUSERVE, "serve", str(config), *JSON_LOG) as addresses:
        yield addresses


def ask(server: Addresses, model: str, shape: tuple[int, ...]) -> Any:
    x = np.arange(np.prod(shape), dtype=np.float32).reshape(shape) % 7 + 1
    given = InferInput("x", list(shape), "FP32")
    given.set_data_from_numpy(x)
    with InferenceServerClient(server.grpc) as client:
        answer = client.infer(model, [given])
    assert np.array_equal(answer.as_numpy("twice"), 2 * x)
    assert np.array_equal(answer.as_numpy("total")[:, 0], x.reshape(shape[0], -1).sum(axis=1))
    return answer.as_numpy("rows")[0, 0]


def ask_at_once(server: Addresses, model: str, shapes: Sequence[tuple[int, ...]]) -> list[int]:
    with ThreadPoolExecutor(len(shapes)) as pool:
        return list(pool.map(lambda shape: ask(server, model, shape), shapes))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("lengths", [SMALL, LARGE, (8,) * 6])
def test_requests_of_any_length_share_a_batch_and_get_their_own_rows(
    server: Addresses, form: str, lengths: tuple[int, ...]
) -> None:
    shapes = list(zip((1, 2, 1, 3, 1, 1), lengths, strict=True))
    assert ask_at_once(server, form, shapes) == [9] * 6


def test_the_limit_of_elements_counts_every_row_as_long_as_the_longest(server: Addresses) -> None:
    assert set(ask_at_once(server, "budget", [(1, 50)] * 3)) <= {1, 2}
    assert ask(server, "budget", (1, 5_000)) == 1


def test_the_limit_of_elements_counts_the_largest_size_of_each_axis(server: Addresses) -> None:
    padded_before = metric(server, 'gpuserve_ragged_padded_elements_total{model="images"')
    assert ask_at_once(server, "images", [(1, 2, 20), (1, 20, 2)]) == [1, 1], "2 x 20 x 20 if padded"
    assert metric(server, 'gpuserve_ragged_padded_elements_total{model="images"') - padded_before == 80
    assert set(ask_at_once(server, "images", [(1, 2, 3), (1, 4, 2)])) <= {1, 2}


def test_a_batch_holds_lengths_of_one_bucket(server: Addresses) -> None:
    short, long = [(1, length) for length in (2, 9, 10)], [(1, length) for length in (11, 50, 100)]
    rows = ask_at_once(server, "buckets", [*short, *long])
    assert max(rows) <= 3


def test_a_request_that_is_too_long_is_refused_alone(server: Addresses) -> None:
    def outcome(length: int) -> str:
        try:
            ask(server, "padded", (1, length))
        except InferenceServerException as error:
            return f"{error.status()} {error.message()}"
        return "OK"

    with ThreadPoolExecutor(9) as pool:
        found = list(pool.map(outcome, [100_001, *range(8)]))
    assert found[1:] == ["OK"] * 8
    assert "INVALID_ARGUMENT" in found[0]
    assert "input 'x' has the length 100001, expected at most 100000" in found[0]


def test_the_waste_of_padding_is_counted(server: Addresses) -> None:
    names = ("gpuserve_ragged_elements_total", "gpuserve_ragged_padded_elements_total")
    before = [metric(server, name) for name in names]
    assert ask_at_once(server, "requests", [(1, 10), (8, 30)]) == [9, 9]
    sent, padded = (metric(server, name) - one for name, one in zip(names, before, strict=True))
    assert (sent, padded) == (250, 270)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (("shape: [-1], ragged", "shape: [4], ragged"), "ragged needs a size of -1 in the shape, given [4]"),
        (("max_batch_size: 32", "max_batch_size: 0"), "ragged has no effect without a max_batch_size"),
        (("preferred_batch_sizes: [9]", "bucket_boundaries: [9, 3]"), "bucket_boundaries must ascend"),
        (
            ("[-1], ragged: true}]\n    outputs", "[-1]}]\n    outputs"),
            "bucket_boundaries has no effect without an input that is ragged",
        ),
    ],
)
def test_a_declaration_that_cannot_be(tmp_path: Path, change: tuple[str, str], text: str) -> None:
    more = ", bucket_boundaries: [3, 9]" if "has no effect without an input" in text else ""
    entry = MODEL.format(name="m", models=MODELS, form="rows", rows=9, more=more).replace(*change)
    (tmp_path / "config.yaml").write_text("models:" + entry)
    command = [GPUSERVE, "check", str(tmp_path / "config.yaml")]
    done = finished(command)
    assert done.returncode != 0
    assert text in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        (", max_batch_size: 0", "FP32 [-1]\n"),
        pytest.param("", "FP32 [-1], ragged", marks=pytest.mark.thorough),
    ],
)
def test_a_callable_that_declares_a_ragged_input_may_be_served_without_batches(
    tmp_path: Path, entry: str, text: str
) -> None:
    tensors = '{"name": "x", "dtype": "float32", "shape": [-1], "ragged": True}'
    source = f"""class Model:
    @classmethod
    def declare(cls):
        return {{"inputs": [{tensors}], "outputs": [{tensors}], "max_batch_size": 8}}

    def __call__(self, requests):
        return requests
"""
    (tmp_path / "model.py").write_text(source)
    (tmp_path / "config.yaml").write_text(f'models: [{{name: m, callable: "model.py:Model"{entry}}}]')
    command = [GPUSERVE, "check", str(tmp_path / "config.yaml")]
    done = finished(command)
    assert done.returncode == 0, done.stderr
    assert text in done.stdout
