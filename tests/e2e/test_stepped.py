"""Stepped callables behind a real server: requests join, leave, wait, fail and end between steps."""

from __future__ import annotations

import json
import queue
import socket
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from bound import Refused, free_server, infer
from config_file import served
from exploring import variants
from models.stepped import HANGS, KILLS, RAISES, REFUSED, Counting
from processes import wait_until
from serving import Addresses

from gpuserve import ModelConfig, SequenceBatching
from gpuserve.core.errors import BindError

TIMEOUT_S = 20.0
STEPPED = Path(__file__).resolve().parents[1] / "models" / "stepped.py"
LONG = 900


def entry(name: str, record: Path, target: str = "Counting", **more: Any) -> dict[str, Any]:
    kwargs = {"record": str(record / name), **more.pop("kwargs", {})}
    return {"name": name, "callable": f"{STEPPED}:{target}", "kwargs": kwargs, **more}


def chain(last: str, name: str) -> dict[str, Any]:
    """Return the entry of an ensemble: ``last`` counts to twice the number."""
    steps = [
        {"model": "twice", "inputs": {"n": "n"}, "outputs": {"OUTPUT_1": "doubled"}},
        {"model": last, "inputs": {"n": "doubled"}, "outputs": {"value": "count"}},
    ]
    inputs = [{"name": "n", "dtype": "int32", "shape": [1]}]
    outputs = [{"name": "count", "dtype": "int32", "shape": [-1]}]
    return {
        "name": name, "decoupled": True, "inputs": inputs, "outputs": outputs, "ensemble": {"steps": steps}
    }  # fmt: skip


@pytest.fixture(scope="module")
def record(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("record")


@pytest.fixture(scope="module", params=variants(1, 2))
def server(request: pytest.FixtureRequest, record: Path) -> Iterator[Addresses]:
    models = [
        entry("counter", record),
        entry("awaiting", record, "Awaiting"),
        entry("wide", record, kwargs={"width": 20_000}),
        entry("narrow", record, kwargs={"room": 2}),
        entry(
            "whole", record, kwargs={"whole": True, "step_s": 0.01}, decoupled=False, execution_timeout_s=1
        ),
        entry("patient", record, execution_timeout_s=1),
        {"name": "twice", "callable": f"{STEPPED}:twice"},
        *(chain(step, f"chained-{step}") for step in ("counter", "wide")),
        {"name": "words", "callable": f"{STEPPED.with_name('stepped_words.py')}:Words"},
    ]
    folder = record / str(request.param)
    folder.mkdir()
    with served(folder, models, ingress_processes=request.param) as addresses:
        yield addresses


class Streams:
    """Requests on one stream of gRPC, and their responses by request."""

    def __init__(self, addresses: Addresses) -> None:
        self._client = tritonclient.grpc.InferenceServerClient(addresses.grpc)
        self._came: queue.Queue[tuple[Any, Any]] = queue.Queue()
        self._client.start_stream(lambda result, error: self._came.put((result, error)))
        self.values: dict[str, list[int]] = {}
        self.ended: list[str] = []
        self.errors: list[str] = []

    def send(self, model: str, name: str, n: int, **options: Any) -> None:
        tensor = tritonclient.grpc.InferInput("n", [1], "INT32")
        tensor.set_data_from_numpy(np.array([n], np.int32))
        self._client.async_stream_infer(
            model, [tensor], request_id=name, enable_empty_final_response=True, **options
        )

    def next(self) -> None:
        result, error = self._came.get(timeout=TIMEOUT_S)
        if error is not None:
            self.errors.append(error.message())
            return
        response = result.get_response()
        value = result.as_numpy("value")
        value = result.as_numpy("count") if value is None else value
        if value is not None:
            self.values.setdefault(response.id, []).append(int(value[0]))
        if response.parameters["triton_final_response"].bool_param:
            self.ended.append(response.id)

    def until(self, name: str, count: int = 0) -> None:
        """Read responses until a request has ended, or has so many."""
        while not (len(self.values.get(name, ())) >= count if count else name in self.ended):
            self.next()

    def until_over(self, count: int) -> None:
        """Read responses until so many requests have ended, well or not."""
        while len(self.ended) + len(self.errors) < count:
            self.next()

    def close(self, *, cancel: bool = True) -> None:
        self._client.stop_stream(cancel_requests=cancel)
        self._client.close()


@contextmanager
def streams(addresses: Addresses) -> Iterator[Streams]:
    opened = Streams(addresses)
    try:
        yield opened
    finally:
        opened.close()


def events(record: Path, model: str) -> Counter[tuple[str, int]]:
    path = record / model
    lines = path.read_text().splitlines() if path.exists() else []
    return Counter((what, int(n)) for what, n, _ in map(str.split, lines))


def wait_released(record: Path, model: str, n: int, count: int) -> None:
    wait_until(lambda: events(record, model)["release", n] >= count, f"{count} releases of {n}")


@pytest.mark.parametrize("model", ["counter", "awaiting", "wide"])
def test_requests_join_and_leave_between_steps(server: Addresses, model: str) -> None:
    with streams(server) as open_streams:
        open_streams.send(model, "long", LONG)
        open_streams.until("long", 3)
        for name, n in (("one", 1), ("five", 5)):
            open_streams.send(model, name, n)
        open_streams.until("five")
        open_streams.until("one")
        assert "long" not in open_streams.ended
        assert (open_streams.values["one"], open_streams.values["five"]) == ([1], [1, 2, 3, 4, 5])
        open_streams.until("long")
        assert open_streams.values["long"] == list(range(1, LONG + 1))
        assert not open_streams.errors


def test_responses_over_generate_stream(server: Addresses) -> None:
    body = json.dumps({"n": 3}).encode()
    request = urllib.request.Request(f"http://{server.http}/v2/models/counter/generate_stream", body)
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        lines = [json.loads(line[6:]) for line in answer if line.startswith(b"data: ")]
    assert [one["value"] for one in lines if "value" in one] == [1, 2, 3]


@pytest.mark.parametrize("last", ["counter", "wide"])
def test_the_last_step_of_an_ensemble(server: Addresses, record: Path, last: str) -> None:
    before = events(record, last)["release", 200_008]
    with streams(server) as open_streams:
        open_streams.send(f"chained-{last}", "endless", 100_004)
        open_streams.until("endless", 2)
        open_streams.send(f"chained-{last}", "short", 100)
        open_streams.until("short")
        assert open_streams.values["short"] == list(range(1, 201))
        open_streams.send(f"chained-{last}", "raises", REFUSED // 2)
        open_streams.until_over(2)
        assert open_streams.errors == [f"in ensemble 'chained-{last}', not this number"]
    wait_released(record, last, 200_008, before + 1)
    body = json.dumps({"inputs": [{"name": "n", "datatype": "INT32", "shape": [1], "data": [1]}]}).encode()
    request = urllib.request.Request(f"http://{server.http}/v2/models/chained-{last}/infer", body)
    with pytest.raises(urllib.error.HTTPError, match="501"):
        urllib.request.urlopen(request, timeout=TIMEOUT_S)


def complete(server: Addresses, **body: Any) -> Any:
    url = f"http://{server.http}/v1/completions"
    request = urllib.request.Request(url, json.dumps({"model": "words", **body}).encode())
    with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
        if not body.get("stream"):
            return json.load(answer)
        lines = [line[6:] for line in answer if line.startswith(b"data: {")]
    return [json.loads(one) for one in lines]


def test_answers_of_openai(server: Addresses) -> None:
    prompts = ["one two three", "four"]
    whole = complete(server, prompt=prompts, n=4)  # more answers than may be active
    assert [one["text"] for one in whole["choices"]] == ["one two three "] * 4 + ["four "] * 4
    assert whole["usage"]["completion_tokens"] == 16
    options = {"max_tokens": 2, "stream": True, "stream_options": {"include_usage": True}}
    chunks = complete(server, prompt=prompts, **options)
    texts = ["", ""]
    for choice in [choice for one in chunks for choice in one["choices"]]:
        texts[choice["index"]] += choice["text"]
    assert texts == ["one two ", "four "]
    assert chunks[-1]["usage"]["completion_tokens"] == 3
    with pytest.raises(urllib.error.HTTPError) as refused:
        complete(server, prompt="one", max_tokens=13)
    assert refused.value.code == 400
    assert "an unlucky number" in refused.value.read().decode()


def test_the_only_response_of_a_model_that_is_not_decoupled(server: Addresses) -> None:
    for n in (1, 200):  # the steps of the second take longer than execution_timeout_s
        body = {"inputs": [{"name": "n", "datatype": "INT32", "shape": [1], "data": [n]}]}
        request = urllib.request.Request(
            f"http://{server.http}/v2/models/whole/infer", json.dumps(body).encode()
        )
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            assert json.load(answer)["outputs"][0]["data"] == [n]


def test_later_keeps_requests_in_the_queue(server: Addresses, record: Path) -> None:
    before = events(record, "narrow")["admit", 20]
    with streams(server) as open_streams:
        for number in range(7):
            open_streams.send("narrow", str(number), 20)
        open_streams.until_over(7)
        assert sorted(open_streams.ended) == sorted(map(str, range(7)))
    active = most = 0
    for line in (record / "narrow").read_text().splitlines():
        active += {"admit": 1, "release": -1}[line.split()[0]]
        most = max(most, active)
    assert most == 2
    assert events(record, "narrow")["admit", 20] == before + 7


def test_an_exception_fails_its_request_and_no_other(server: Addresses, record: Path) -> None:
    before = events(record, "counter")
    with streams(server) as open_streams:
        open_streams.send("counter", "refused", REFUSED)
        open_streams.until_over(1)
        assert open_streams.errors == ["not this number"]
        open_streams.send("counter", "begun", LONG)
        open_streams.until("begun", 2)
        # The three arrive together with some luck; each of them has sent nothing when ``step`` raises.
        for name, n in (("poison", RAISES), ("a", 5), ("b", 5)):
            open_streams.send("counter", name, n)
        open_streams.until_over(5)
        assert open_streams.errors[1:] == ["poison"] * 2
        assert {"a", "b"} <= set(open_streams.ended)
    after = events(record, "counter") - before
    assert after["admit", RAISES] == after["release", RAISES] == 2 == after["poison", RAISES]
    assert after["admit", LONG] == after["release", LONG] == 1


@pytest.mark.parametrize("how", ["client is gone", "deadline"])
def test_a_request_that_nobody_waits_for_is_released(server: Addresses, record: Path, how: str) -> None:
    n = {"client is gone": 100_001, "deadline": 100_002}[how]
    before = events(record, "counter")["release", n]
    with streams(server) as open_streams:
        options = {"timeout": 200_000} if how == "deadline" else {}
        open_streams.send("counter", "endless", n, **options)
        open_streams.until("endless", 2)
        if how == "deadline":
            open_streams.until_over(1)
            assert "deadline" in open_streams.errors[0].lower()
    wait_released(record, "counter", n, before + 1)


def test_a_slow_reader_delays_nobody(server: Addresses, record: Path) -> None:
    n = 100_003
    before = events(record, "wide")["release", n]
    host, port = server.http.split(":")
    body = json.dumps({"n": n}).encode()
    head = f"POST /v2/models/wide/generate_stream HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as unread:
        unread.sendall(head.encode() + body)
        assert unread.recv(1), "the first response has come"
        with streams(server) as open_streams:
            open_streams.send("wide", "read", 300)
            open_streams.until("read")
            assert len(open_streams.values["read"]) == 300
        assert events(record, "wide")["release", n] == before
    wait_released(record, "wide", n, before + 1)


def test_the_death_of_a_worker(server: Addresses) -> None:
    with streams(server) as open_streams:
        open_streams.send("counter", "begun", LONG)
        open_streams.until("begun", 2)
        for name, n in (("poison", KILLS), ("a", 5), ("b", 5)):
            open_streams.send("counter", name, n)
        open_streams.until_over(4)
        assert all("worker process died" in one for one in open_streams.errors), open_streams.errors
        assert sorted(open_streams.ended) == ["a", "b"]


def test_a_step_that_does_not_return(server: Addresses, record: Path) -> None:
    before = events(record, "patient")
    with streams(server) as open_streams:
        open_streams.send("patient", "begun", LONG)
        open_streams.until("begun", 2)
        for name, n in (("hangs", HANGS), ("a", 5), ("b", 5)):
            open_streams.send("patient", name, n)
        open_streams.until_over(4)
        assert all("was not back within" in one for one in open_streams.errors), open_streams.errors
        assert sorted(open_streams.ended) == ["a", "b"]
    after = events(record, "patient") - before
    assert after["poison", HANGS] == 2, "with others, and alone"


def test_steps_are_counted(server: Addresses) -> None:
    with streams(server) as open_streams:
        open_streams.send("awaiting", "counted", 20)
        open_streams.until("counted")
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=TIMEOUT_S) as answer:
        lines = [line for line in answer.read().decode().splitlines() if 'model="awaiting"' in line]
    values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in lines}
    assert values["gpuserve_steps_total"] >= 20
    assert values["gpuserve_step_requests_total"] >= values["gpuserve_step_responses_total"] >= 20
    assert values["gpuserve_step_duration_seconds_count"] == values["gpuserve_steps_total"]
    assert values["gen_ai_server_time_to_first_token_seconds_count"] >= 1
    assert values["gen_ai_server_time_per_output_token_seconds_count"] >= 19


def test_bound_and_drained() -> None:
    """A callable is bound like any other; a server that ends finishes its active requests."""
    with free_server() as bound:
        bound.bind("counter", Counting(), config=ModelConfig(batching=False, max_active=2))
        bound.bind("listed", [Counting(), Counting()])
        bound.run()
        assert infer(bound, "counter", n=np.array([1], np.int32))["value"].tolist() == [1]  # not decoupled
        with pytest.raises(Refused, match="decoupled"):
            infer(bound, "listed", n=np.array([1], np.int32))
        addresses = Addresses("", bound.addresses["grpc"], "")
        opened = Streams(addresses)
        for number in range(6):
            opened.send("listed", str(number), 200)
        opened.until("5", 1)
        bound.stop()
        opened.until_over(6)
        assert sorted(opened.ended) == sorted(map(str, range(6)))
        opened.close()


def test_a_config_that_does_not_fit_a_stepped_callable() -> None:
    with free_server() as bound, pytest.raises(BindError, match="sequence_batching does not go with"):
        bound.bind("counter", Counting(), config=ModelConfig(sequence_batching=SequenceBatching()))
