"""Metrics that callables keep: what all instances counted is one family on the server's page."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from config_file import tensor, write_config
from operated import OperatedServer
from processes import wait_until
from prometheus_client.parser import text_string_to_metric_families
from serving import GPUSERVE, Addresses, serving
from tritonclient.utils import InferenceServerException

MODELS = Path(__file__).resolve().parents[1] / "models" / "counting.py"
POISON = -13.0
INSTANCES = 2


def entry(name: str, attribute: str, **more: Any) -> dict[str, Any]:
    tensors = {"inputs": [tensor("x", "FP32", 1)], "outputs": [tensor("y", "FP32", 1)]}
    return {"name": name, "callable": f"{MODELS}:{attribute}", **tensors, "max_batch_size": 4, **more}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    count = [{"device": "cpu", "count": INSTANCES}]
    models = [
        entry("counting", "Counting", instances=count, kwargs={"bounds": [0.5, 2]}),
        entry("awaiting", "awaiting"),
        entry("conflicting", "conflicting"),
    ]
    settings = {"host": "127.0.0.1", "model_control": "explicit"}
    config = write_config(tmp_path_factory.mktemp("metrics"), models, **settings)
    with serving(GPUSERVE, "serve", str(config)) as addresses:
        yield addresses


def ask(client: tritonclient.grpc.InferenceServerClient, model: str, *rows: float) -> None:
    x = np.array([[one] for one in rows], np.float32)
    tensor = tritonclient.grpc.InferInput("x", x.shape, "FP32")
    tensor.set_data_from_numpy(x)
    client.infer(model, [tensor], client_timeout=20)


def scrape(server: Addresses) -> str:
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10) as page:
        return str(page.read().decode())


def value(server: Addresses, name: str, **labels: str) -> float | None:
    for family in text_string_to_metric_families(scrape(server)):
        for one in family.samples:
            if one.name == name and one.labels == labels:
                return float(one.value)
    return None


def await_value(server: Addresses, expected: float, name: str, **labels: str) -> None:
    wait_until(lambda: value(server, name, **labels) == expected, f"{name} to be {expected}")


def test_what_all_instances_counted_is_one_and_survives_them(
    server: Addresses, client: tritonclient.grpc.InferenceServerClient
) -> None:
    await_value(server, INSTANCES, "counting_rows_total", model="loads")
    for _ in range(8):
        ask(client, "counting", 0.5, 1, 3)
    await_value(server, 24, "counting_rows_total", model="counting")
    with pytest.raises(InferenceServerException):
        ask(client, "counting", POISON)  # which kills one after the other
    await_value(server, 2 * INSTANCES, "counting_rows_total", model="loads")
    ask(client, "counting", 7)
    await_value(server, 25, "counting_rows_total", model="counting")


def test_a_histogram_and_a_gauge(server: Addresses, client: tritonclient.grpc.InferenceServerClient) -> None:
    def buckets() -> list[float]:
        bounds = ("0.5", "2.0", "+Inf")
        return [value(server, "counting_values_bucket", of='a "model"', le=bound) or 0.0 for bound in bounds]

    before = buckets()
    ask(client, "counting", 0.5)
    ask(client, "counting", 2, 2.5)
    wait_until(lambda: buckets() == [before[0] + 1, before[1] + 2, before[2] + 3], "its buckets")
    ask(client, "counting", 2.5)  # all before is told: of two instances the last to tell has the word
    await_value(server, 2.5, "counting_last")
    assert "# TYPE counting_values histogram" in scrape(server)
    assert "# HELP counting_rows_total Rows \\\\ that\\ncame." in scrape(server)


def test_a_callable_that_awaits_counts_too(
    server: Addresses, client: tritonclient.grpc.InferenceServerClient
) -> None:
    ask(client, "awaiting", 1)
    ask(client, "awaiting", 1)
    await_value(server, 2, "awaiting_total")


def test_two_models_cannot_mean_different_things_by_one_name(
    server: Addresses, client: tritonclient.grpc.InferenceServerClient
) -> None:
    wait_until(lambda: value(server, "counting_last") is not None, "the gauge")
    ask(client, "conflicting", 1)
    wait_until(lambda: value(server, "conflicting_total") is not None, "what fits in")
    page = scrape(server)
    assert "# TYPE counting_last gauge" in page
    assert "# TYPE counting_values_sum" not in page


def test_a_model_that_is_gone_takes_its_own_along(
    server: Addresses, client: tritonclient.grpc.InferenceServerClient
) -> None:
    ask(client, "awaiting", 1)
    wait_until(lambda: value(server, "awaiting_total") is not None, "the metric")
    client.unload_model("awaiting")
    wait_until(lambda: value(server, "awaiting_total") is None, "its end")
    client.load_model("awaiting")
    ask(client, "awaiting", 1)
    await_value(server, 1, "awaiting_total")


@pytest.mark.thorough
def test_a_new_front_is_told_all_that_living_workers_counted(tmp_path: Path) -> None:
    config = write_config(tmp_path, [entry("counting", "Counting", kwargs={"bounds": [0.5, 2]})])
    with OperatedServer(config).until_killed() as running:
        addresses = Addresses(**{name.lower(): one for name, one in running.addresses.items()})
        with tritonclient.grpc.InferenceServerClient(addresses.grpc) as client:
            ask(client, "counting", 0.5, 3)
        await_value(addresses, 2, "counting_rows_total", model="counting")
        before = running.front
        os.kill(before, signal.SIGKILL)
        wait_until(lambda: running.front != before, "another front")

        def shown() -> list[float | None]:
            try:
                names = ("counting_rows_total", "counting_last", "counting_values_count")
                labels: list[dict[str, str]] = [{"model": "counting"}, {}, {"of": 'a "model"'}]
                return [value(addresses, name, **more) for name, more in zip(names, labels, strict=True)]
            except (OSError, urllib.error.URLError):  # it does not listen yet
                return []

        wait_until(lambda: shown() == [2, 3, 2], "what was counted before")
