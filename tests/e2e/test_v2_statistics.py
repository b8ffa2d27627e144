"""The statistics of models, by both protocols: what was asked is what is counted."""

from __future__ import annotations

import os
import queue
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from config_file import MODELS, model, tensor, write_config
from google.protobuf import json_format
from processes import wait_until
from prometheus_client.parser import text_string_to_metric_families
from serving import GPUSERVE, Addresses, serving
from tritonclient.grpc import service_pb2 as pb
from tritonclient.utils import InferenceServerException

CLIENTS = {"grpc": tritonclient.grpc, "http": tritonclient.http}
RAISES = MODELS.with_name("raises.py")
STREAMS = MODELS.with_name("streams.py")
ROWS_A_BATCH = 4
TIMEOUT_S = 15.0
X, Y = [tensor("x", "INT32", -1)], [tensor("y", "INT32", -1)]


@pytest.fixture(scope="module")
def fifo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gate") / "fifo"
    os.mkfifo(path)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, fifo: Path) -> Iterator[Addresses]:
    """Each test has a model of its own, so that its numbers start at 0."""
    started = {
        "merged": model("merged", "echo", X, Y, ROWS_A_BATCH, batching={"max_queue_delay_us": 60_000_000}),
        "raising": model("raising", "echo", X, Y, 4, callable=f"{RAISES}:always"),
        "picky": model("picky", "echo", X, Y, 2, callable=f"{RAISES}:negative"),
        "cached": model("cached", "echo", X, Y, 4, response_cache=True),
        "count": model("count", "echo", X, Y, 4, callable=f"{STREAMS}:count", decoupled=True),
        "fails": model("fails", "echo", X, Y, 4, callable=f"{STREAMS}:fails_half_way", decoupled=True),
        "idle": model("idle", "echo", X, Y, 4),
        "gated": model(
            "gated",
            "Gate",
            X,
            [tensor("seen", "BYTES", 1)],
            1,
            kwargs={"path": str(fifo)},
            queue={"max_requests": 1},
        ),
    }
    folder = tmp_path_factory.mktemp("statistics")
    settings = {"response_cache_nbytes": 1 << 20, "metrics_summaries": True}
    config = write_config(folder, list(started.values()), host="127.0.0.1", **settings)
    with serving(GPUSERVE, "serve", str(config)) as addresses:
        yield addresses


def client(server: Addresses, protocol: str) -> Any:
    return CLIENTS[protocol].InferenceServerClient(server.grpc if protocol == "grpc" else server.http)


def values(protocol: str, rows: int, value: int) -> Any:
    made = CLIENTS[protocol].InferInput("x", [rows, 1], "INT32")
    made.set_data_from_numpy(np.full((rows, 1), value, np.int32))
    return made


def infer(server: Addresses, protocol: str, name: str, rows: int, value: int = 1, **options: Any) -> None:
    with client(server, protocol) as asked:
        asked.infer(name, [values(protocol, rows, value)], **options)


def asked_by(server: Addresses, protocol: str, *of: str) -> Any:
    """The answer of one protocol as a ``ModelStatisticsResponse``; no member may be unknown to it."""
    with client(server, protocol) as asked:
        found = asked.get_inference_statistics(*of)
    return json_format.ParseDict(found, pb.ModelStatisticsResponse()) if protocol == "http" else found


def statistics(server: Addresses, name: str) -> Any:
    """Those of one model, about which both protocols agree."""
    by_grpc, by_http = (asked_by(server, protocol, name) for protocol in CLIENTS)
    assert by_grpc == by_http
    (found,) = by_grpc.model_stats
    assert (found.name, found.version) == (name, "1")
    return found


def counts(found: Any) -> dict[str, int]:
    """The counts of ``inference_stats`` that are not 0; a duration without a count is 0 too."""
    fields = {field.name: value for field, value in found.inference_stats.ListFields()}
    assert all(one.count or not one.ns for one in fields.values())
    return {name: one.count for name, one in fields.items() if one.count}


def samples(server: Addresses, prefix: str, **labels: str) -> dict[str, float]:
    """Metric samples that have these labels: the name, with the labels that are left, -> value."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=TIMEOUT_S) as page:
        families = list(text_string_to_metric_families(page.read().decode()))
    found = {}
    # The parser ends the names of all counters in "_total", also of those that have no such ending.
    for one in (sample for family in families for sample in family.samples):
        if one.name.startswith(prefix) and labels.items() <= one.labels.items():
            left = sorted(value for key, value in one.labels.items() if key not in labels)
            name = one.name.removesuffix("_total") if one.name.startswith("nv_") else one.name
            found[",".join([name, *left])] = one.value
    return found


def test_merged_batches_are_counted_by_their_size(server: Addresses) -> None:
    """Two batches of four rows each: of 1 + 3 and of 2 + 2, by both protocols at once."""
    before_ms = time.time() * 1000
    for sizes in ((1, 3), (2, 2)):
        with ThreadPoolExecutor() as pool:
            jobs = [
                pool.submit(infer, server, protocol, "merged", rows)
                for protocol, rows in zip(CLIENTS, sizes, strict=True)
            ]
        for one in jobs:
            one.result()
    found = statistics(server, "merged")
    assert before_ms - 1 <= found.last_inference <= time.time() * 1000
    assert (found.inference_count, found.execution_count) == (8, 2)
    computed = dict.fromkeys(("compute_input", "compute_infer", "compute_output"), 4)
    assert counts(found) == {"success": 4, "queue": 4, **computed}
    (batch,) = found.batch_stats
    assert batch.batch_size == ROWS_A_BATCH
    each = found.inference_stats
    for phase in computed:
        once, times_requests = getattr(batch, phase), getattr(each, phase)
        assert once.count == 2
        assert times_requests.ns == 2 * once.ns > 0, "every request of a batch has all of its time"
    parts = each.queue.ns + each.compute_input.ns + each.compute_infer.ns + each.compute_output.ns
    assert each.success.ns >= parts
    (memory,) = found.memory_usage
    assert (memory.type, memory.id) == ("CPU", 0)
    assert not found.response_stats
    at = {"model": "merged", "version": "1"}
    by_name = samples(server, "nv_inference_", **at)
    assert by_name["nv_inference_request_success"] == 4
    assert (by_name["nv_inference_count"], by_name["nv_inference_exec_count"]) == (8, 2)
    assert by_name["nv_inference_request_duration_us"] == each.success.ns // 1000
    assert by_name["nv_inference_compute_infer_duration_us"] == each.compute_infer.ns // 1000
    assert by_name["nv_inference_compute_infer_summary_us_count"] == 4
    assert by_name["nv_inference_request_summary_us,0.5"] > 0
    of_instance = samples(server, "gpuserve_instance_", **at, instance="cpu#0")
    assert of_instance["gpuserve_instance_requests_success_total"] == 4
    assert of_instance["gpuserve_instance_inferences_total"] == 8
    assert of_instance["gpuserve_instance_executions_total"] == 2
    assert samples(server, "nv_model_load_duration_secs", **at)["nv_model_load_duration_secs"] > 0


def test_a_batch_that_fails_is_no_execution(server: Addresses) -> None:
    for protocol in CLIENTS:
        with pytest.raises(InferenceServerException, match="spoiled"):
            infer(server, protocol, "raising", 2)
    found = statistics(server, "raising")
    assert (counts(found), found.inference_count, found.execution_count) == ({"fail": 2}, 0, 0)
    assert not found.batch_stats
    assert samples(server, "nv_inference_request_failure", model="raising", version="1") == {
        f"nv_inference_request_failure,{reason}": 2.0 * (reason == "BACKEND")
        for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER")
    }


def test_a_request_that_fails_alone_leaves_its_batch_an_execution(server: Addresses) -> None:
    for protocol in CLIENTS:
        infer(server, protocol, "picky", 2)
        with pytest.raises(InferenceServerException, match="negative"):
            infer(server, protocol, "picky", 1, -1)
    found = statistics(server, "picky")
    assert (found.inference_count, found.execution_count) == (4, 4)
    assert (found.inference_stats.success.count, found.inference_stats.fail.count) == (2, 2)
    assert [(one.batch_size, one.compute_infer.count) for one in found.batch_stats] == [(1, 2), (2, 2)]


def test_requests_that_are_wrong_are_not_counted(server: Addresses) -> None:
    for protocol in CLIENTS:
        with pytest.raises(InferenceServerException, match="batch-size must be <= 4"):
            infer(server, protocol, "idle", 5)
    found = statistics(server, "idle")
    assert (counts(found), found.last_inference, found.inference_count) == ({}, 0, 0)


def test_hits_of_the_cache_are_successes_that_are_no_inferences(server: Addresses) -> None:
    for protocol in ("grpc", "http", "grpc"):
        infer(server, protocol, "cached", 2)
    infer(server, "http", "cached", 1, 9)
    found = statistics(server, "cached")
    assert (found.inference_count, found.execution_count) == (3, 2)
    computed = dict.fromkeys(("compute_input", "compute_infer", "compute_output"), 2)
    assert counts(found) == {"success": 4, "queue": 4, "cache_hit": 2, "cache_miss": 2, **computed}
    by_name = samples(server, "nv_cache_", model="cached", version="1")
    assert by_name["nv_cache_num_hits_per_model"] == by_name["nv_cache_num_misses_per_model"] == 2
    assert by_name["nv_cache_hit_duration_per_model"] == found.inference_stats.cache_hit.ns // 1000


def stream(server: Addresses, name: str, wanted: int) -> list[Any]:
    """All that comes for one request."""
    heard: queue.Queue[Any] = queue.Queue()
    with client(server, "grpc") as asked:
        asked.start_stream(lambda result, error: heard.put(error or result))
        asked.async_stream_infer(name, [values("grpc", 1, wanted)], enable_empty_final_response=True)
        all_of_it = [heard.get(timeout=TIMEOUT_S)]
        while not is_last(all_of_it[-1]):
            all_of_it.append(heard.get(timeout=TIMEOUT_S))
        asked.stop_stream()
    return all_of_it


def is_last(one: Any) -> bool:
    if isinstance(one, InferenceServerException):
        return True
    return bool(one.get_response().parameters["triton_final_response"].bool_param)


def responses(found: Any) -> dict[str, dict[str, int]]:
    """The counts of ``response_stats`` that are not 0."""
    return {
        index: {field.name: one.count for field, one in fates.ListFields() if one.count}
        for index, fates in found.response_stats.items()
    }


def test_responses_of_decoupled_models_are_counted_by_index(server: Addresses) -> None:
    assert [len(stream(server, "count", wanted)) for wanted in (2, 1)] == [3, 2]
    found = statistics(server, "count")
    once = {"compute_infer": 1, "compute_output": 1, "success": 1}
    assert responses(found) == {
        "0": dict.fromkeys(once, 2),
        "1": {**once, "empty_response": 1},
        "2": {"empty_response": 1},
    }
    assert (found.inference_stats.success.count, found.execution_count) == (2, 2)
    assert found.response_stats["0"].success.ns >= found.response_stats["0"].compute_infer.ns > 0
    name = "nv_inference_first_response_histogram_ms_count"
    assert samples(server, name, model="count", version="1") == {name: 2}


def test_a_stream_that_fails(server: Addresses) -> None:
    assert isinstance(stream(server, "fails", 0)[-1], InferenceServerException)
    found = statistics(server, "fails")
    once = {"compute_infer": 1, "compute_output": 1, "success": 1}
    failed = {"compute_infer": 1, "compute_output": 1, "fail": 1}
    assert responses(found) == {"0": once, "1": once, "2": once, "3": failed}
    assert (counts(found), found.execution_count) == ({"fail": 1}, 0)


def test_what_is_refused_and_what_is_taken_back(server: Addresses, fifo: Path) -> None:
    """One request runs, one waits, and the next is refused; then the waiting one's client leaves."""

    def is_held(running: int, queued: int) -> bool:
        found = samples(server, "gpuserve_", model="gated", version="1")
        gauges = found["gpuserve_running_requests"], found["gpuserve_queue_requests"]
        return gauges == (running, queued)

    with client(server, "grpc") as asked:
        heard: queue.Queue[Any] = queue.Queue()
        for number, held in ((1, (1, 0)), (2, (1, 1))):
            call = asked.async_infer(
                "gated", [values("grpc", 1, number)], lambda result, error: heard.put(error or result)
            )
            wait_until(lambda held=held: is_held(*held), f"{held} running and queued")
        assert samples(server, "nv_inference_pending", model="gated") == {
            "nv_inference_pending_request_count,1": 1
        }
        for protocol in CLIENTS:
            with pytest.raises(InferenceServerException, match="queue"):
                infer(server, protocol, "gated", 1, 3)
        call.cancel()
        wait_until(lambda: is_held(1, 0), "the one that waited is gone")
        gate = os.open(fifo, os.O_WRONLY)
        os.write(gate, b"1")
        os.close(gate)
        results = [heard.get(timeout=TIMEOUT_S) for _ in range(2)]
    assert sum(isinstance(one, InferenceServerException) for one in results) == 1
    found = statistics(server, "gated")
    assert (found.inference_stats.success.count, found.inference_stats.fail.count) == (1, 3)
    reasons = samples(server, "nv_inference_request_failure", model="gated", version="1")
    assert {name.partition(",")[2]: count for name, count in reasons.items()} == {
        "REJECTED": 2,
        "CANCELED": 1,
        "BACKEND": 0,
        "OTHER": 0,
    }


@pytest.mark.parametrize("protocol", CLIENTS)
def test_all_models_one_model_one_version(server: Addresses, protocol: str) -> None:
    everything = [(one.name, one.version) for one in asked_by(server, protocol).model_stats]
    assert everything == sorted(everything)
    assert [name for name, _ in everything] == [
        "cached", "count", "fails", "gated", "idle", "merged", "picky", "raising"
    ]  # fmt: skip
    assert [one.name for one in asked_by(server, protocol, "idle", "1").model_stats] == ["idle"]


@pytest.mark.parametrize("protocol", CLIENTS)
@pytest.mark.parametrize(
    ("of", "text"),
    [
        (("nope",), "requested model 'nope' is not available"),
        (("idle", "7"), "requested model version is not available for model 'idle'"),
    ],
)
def test_what_does_not_exist(server: Addresses, protocol: str, of: tuple[str, ...], text: str) -> None:
    with pytest.raises(InferenceServerException) as failed:
        asked_by(server, protocol, *of)
    assert failed.value.message() == text
    assert failed.value.status() == {"grpc": "StatusCode.INVALID_ARGUMENT", "http": "400"}[protocol]


def test_the_machine_is_on_the_page(server: Addresses) -> None:
    machine = samples(server, "nv_cpu_")
    assert 0 <= machine["nv_cpu_utilization"] <= 1
    assert 0 < machine["nv_cpu_memory_used_bytes"] < machine["nv_cpu_memory_total_bytes"]
