"""The numbers of the metrics page add up to what was asked, by model and instance."""

from __future__ import annotations

import asyncio
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from config_file import model, served, tensor
from prometheus_client.parser import text_string_to_metric_families
from serving import Addresses
from test_v2_inference import CLIENTS, url
from tritonclient.utils import InferenceServerException

MODELS = Path(__file__).resolve().parents[1] / "models"
#: Batches of the model ``rows``, each of which waits until it is full.
WAVES, BATCHES_A_WAVE, ROWS_A_BATCH = 2, 2, 32
Labels = frozenset[tuple[str, str]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    """Each test has a model of its own, so that its numbers start at 0."""
    x, y = [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)]
    entries = [
        model("counted", "echo", x, y, 8),
        model("raising", "echo", x, y, 8, callable=f"{MODELS / 'raises.py'}:always"),
        model("idle", "echo", x, y, 8),
        model(
            "rows",
            "batch_rows",
            [tensor("x", "INT32", -1)],
            [tensor("rows", "INT32", 1), tensor("y", "INT32", -1)],
            ROWS_A_BATCH,
            instances=[{"device": "cpu", "count": 2}],
            batching={"max_queue_delay_us": 60_000_000},
        ),
    ]
    folder = tmp_path_factory.mktemp("metrics")
    with served(folder, entries) as addresses:
        yield addresses


class Page:
    """A scrape."""

    def __init__(self, server: Addresses) -> None:
        with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10) as page:
            assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
            text = page.read().decode()
        self._samples: dict[str, dict[Labels, float]] = {}
        for family in text_string_to_metric_families(text):
            for one in family.samples:
                self._samples.setdefault(one.name, {})[frozenset(one.labels.items())] = one.value

    def of(self, name: str, **labels: str) -> dict[Labels, float]:
        """The samples that have these labels."""
        samples = self._samples[name].items()
        return {found: value for found, value in samples if labels.items() <= dict(found).items()}

    def sum(self, name: str, **labels: str) -> float:
        return sum(self.of(name, **labels).values())


def infer(server: Addresses, protocol: str, name: str, rows: int, **options: Any) -> Any:
    sent = CLIENTS[protocol].InferInput(options.pop("input_name", "x"), [rows, 2], "FP32")
    sent.set_data_from_numpy(np.ones((rows, 2), np.float32))
    with CLIENTS[protocol].InferenceServerClient(url(server, protocol)) as client:
        return client.infer(name, [sent], **options)


def test_requests_and_refusals_are_counted(server: Addresses) -> None:
    for protocol in CLIENTS:
        for rows in (1, 3, 8):
            infer(server, protocol, "counted", rows)
        for rows, name in ((9, "x"), (1, "wrong")):
            with pytest.raises(InferenceServerException):
                infer(server, protocol, "counted", rows, input_name=name)
    page = Page(server)
    at = {"model": "counted", "version": "1"}
    assert page.sum("gpuserve_requests_success_total", **at) == 6
    assert page.sum("gpuserve_inferences_total", **at) == 24
    assert page.sum("gpuserve_rejected_total", **at, reason="invalid") == 4
    assert page.sum("gpuserve_rejected_total", **at) == 4
    assert page.sum("gpuserve_requests_failure_total", model="counted") == 0
    for histogram in ("request_duration_seconds", "queue_duration_seconds"):
        assert page.sum(f"gpuserve_{histogram}_count", **at) == 6
    assert page.sum("gpuserve_batch_size_count", **at, instance="cpu#0") == 6
    assert page.sum("gpuserve_batch_size_sum", **at, instance="cpu#0") == 24
    assert page.sum("gpuserve_batch_size_bucket", **at, le="2.0") == 2
    assert page.sum("gpuserve_batch_size_bucket", **at, le="4.0") == 4
    assert page.sum("gpuserve_batch_size_bucket", **at, le="+Inf") == 6
    assert page.sum("gpuserve_compute_duration_seconds_count", **at) == 6
    assert page.sum("gpuserve_compute_duration_seconds_sum", **at) > 0
    assert page.sum("gpuserve_compute_duration_seconds_sum", **at) <= page.sum(
        "gpuserve_request_duration_seconds_sum", **at
    )


def test_failures_of_the_callable_are_counted_by_code(server: Addresses) -> None:
    for protocol in CLIENTS:
        with pytest.raises(InferenceServerException, match="spoiled"):
            infer(server, protocol, "raising", 2)
    page = Page(server)
    assert page.sum("gpuserve_requests_failure_total", model="raising", code="INTERNAL") == 2
    assert page.sum("gpuserve_requests_failure_total", model="raising") == 2
    assert page.sum("gpuserve_requests_success_total", model="raising") == 0
    assert page.sum("gpuserve_batch_size_count", model="raising") == 2
    assert page.sum("gpuserve_worker_restarts_total", model="raising") == 0


def test_requests_for_nobody_are_counted_for_nobody(server: Addresses) -> None:
    before = Page(server).sum("gpuserve_rejected_total")
    for protocol in CLIENTS:
        with pytest.raises(InferenceServerException, match="unknown model"):
            infer(server, protocol, "nope", 1)
    page = Page(server)
    assert page.sum("gpuserve_rejected_total") == before
    names = {dict(labels)["model"] for labels in page.of("gpuserve_worker_up")}
    assert names == {"counted", "raising", "idle", "rows"}


def test_an_idle_model_is_all_zeros_but_up(server: Addresses) -> None:
    page = Page(server)
    at = {"model": "idle", "version": "1"}
    assert page.of("gpuserve_worker_up", **at) == {frozenset({*at.items(), ("instance", "cpu#0")}): 1}
    for name in ("requests_success_total", "inferences_total", "cancelled_total", "rejected_total"):
        assert page.sum(f"gpuserve_{name}", **at) == 0
    for name in ("queue_requests", "running_requests", "arena_blocks", "request_duration_seconds_count"):
        assert page.sum(f"gpuserve_{name}", **at) == 0


def test_many_at_once_are_merged_over_both_instances_and_add_up(server: Addresses) -> None:
    async def one(client: Any, number: int, width: int) -> int:
        sent = tritonclient.grpc.InferInput("x", [1, width], "INT32")
        x = np.full((1, width), number, np.int32)
        result = await client.infer("rows", [sent.set_data_from_numpy(x)], request_id=str(number))
        assert result.get_response().id == str(number)
        assert result.as_numpy("y").tolist() == x.tolist()
        return int(result.as_numpy("rows")[0, 0])

    async def all_of_them() -> list[int]:
        # Requests of different widths do not share a batch, so each width is a wave.
        sizes: list[int] = []
        async with tritonclient.grpc.aio.InferenceServerClient(server.grpc) as client:
            for width in range(1, WAVES + 1):
                wave = [one(client, number, width) for number in range(BATCHES_A_WAVE * ROWS_A_BATCH)]
                sizes += await asyncio.gather(*wave)
        return sizes

    sizes = asyncio.run(all_of_them())
    requests = WAVES * BATCHES_A_WAVE * ROWS_A_BATCH
    assert sizes == [ROWS_A_BATCH] * requests
    page = Page(server)
    by_instance = page.of("gpuserve_batch_size_sum", model="rows")
    assert {dict(labels)["instance"] for labels in by_instance} == {"cpu#0", "cpu#1"}
    assert set(by_instance.values()) == {requests / 2}, "an idle model's batches go to both in turn"
    assert page.sum("gpuserve_inferences_total", model="rows") == requests
    assert page.sum("gpuserve_batch_size_count", model="rows") == WAVES * BATCHES_A_WAVE
