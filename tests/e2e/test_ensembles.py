"""Ensembles on real servers: what their steps make of a request, whatever becomes of the steps."""

from __future__ import annotations

import json
import os
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from config_file import served
from ensembles import ensemble, ensembles, members, step
from ingress import with_ingress
from operated import InBackground
from processes import wait_until
from serving import Addresses
from tritonclient.utils import InferenceServerException

CLIENTS = {"grpc": tritonclient.grpc, "http": tritonclient.http}
#: In the message; and 1 MiB a row, which goes through the arenas.
WIDTHS = {"small": 3, "large": 1 << 18}
TIMEOUT_S = 20.0


@pytest.fixture(scope="module")
def fifo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gate") / "fifo"
    os.mkfifo(path)
    return path


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, fifo: Path) -> Iterator[Addresses]:
    held = ensemble(
        "held",
        step("doubled", "a", x="x"),
        step("Gate", "b", x="a"),
        step("plus_one", "c", x="a"),
        step("added", "y", a="b", b="c"),
    )
    models = [*members(str(fifo)), *ensembles(), held]
    folder = tmp_path_factory.mktemp("ensembles")
    with served(folder, models) as addresses:
        yield addresses


@pytest.fixture(params=CLIENTS)
def client(request: pytest.FixtureRequest, server: Addresses) -> Iterator[Any]:
    """A client of either protocol."""
    address = server.grpc if request.param == "grpc" else server.http
    with CLIENTS[request.param].InferenceServerClient(address) as made:
        yield made


@pytest.fixture(autouse=True)
def _no_block_is_left(server: Addresses) -> Iterator[None]:
    yield
    wait_until(lambda: not blocks(server), "every block is free")


def metrics(server: Addresses, *names: str) -> dict[str, float]:
    """The samples of these metrics that are not 0."""
    with urllib.request.urlopen(f"http://{server.metrics}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    pairs = [line.rpartition(" ") for line in lines if line.startswith(names)]
    return {name: float(value) for name, _, value in pairs if float(value)}


def blocks(server: Addresses) -> dict[str, float]:
    names = (*with_ingress("gpuserve_arena_blocks"), "gpuserve_running_requests{")
    return metrics(server, *names)


def library(client: Any) -> Any:
    is_grpc = isinstance(client, tritonclient.grpc.InferenceServerClient)
    return tritonclient.grpc if is_grpc else tritonclient.http


def given(client: Any, name: str, array: Any, datatype: str = "FP32") -> Any:
    made = library(client).InferInput(name, list(array.shape), datatype)
    made.set_data_from_numpy(array)
    return made


def ask(client: Any, model: str, x: Any, **more: Any) -> Any:
    return client.infer(model, [given(client, "x", x)], **more)


def rows(width: int, *values: float) -> Any:
    return np.array([[value] * width for value in values], np.float32)


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_steps_follow_one_another(client: Any, width: int) -> None:
    for number in range(8):
        x = rows(width, number, number + 0.5)
        np.testing.assert_array_equal(ask(client, "chain", x).as_numpy("y"), x * 2 + 1)


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_an_input_may_be_read_by_several_steps(client: Any, width: int) -> None:
    x = rows(width, 1, 2, 3)
    np.testing.assert_array_equal(ask(client, "fan", x).as_numpy("y"), x * 2 + x + 1)


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_a_tensor_may_be_read_by_several_steps_and_by_the_client(client: Any, width: int) -> None:
    x = rows(width, 1, 2)
    answer = ask(client, "diamond", x)
    np.testing.assert_array_equal(answer.as_numpy("d"), x * 2)
    np.testing.assert_array_equal(answer.as_numpy("f"), x * 2 + 1)
    np.testing.assert_array_equal(answer.as_numpy("y"), x * 4 + x * 2 + 1)


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_a_step_may_read_a_tensor_twice(client: Any, width: int) -> None:
    x = rows(width, 5)
    np.testing.assert_array_equal(ask(client, "squared", x).as_numpy("y"), x * 4)


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_who_never_writes_reads_what_others_get_copies_of(client: Any, width: int) -> None:
    x = rows(width, 7)
    np.testing.assert_array_equal(ask(client, "read_only", x).as_numpy("y"), x * 4)


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_a_step_may_be_an_ensemble(client: Any, width: int) -> None:
    x = rows(width, 1, 4)
    np.testing.assert_array_equal(ask(client, "nested", x).as_numpy("y"), (x * 3 + 1) * 2 + 1)


@pytest.mark.parametrize("length", [3, 100_000], ids=["small", "large"])
def test_texts_go_from_step_to_step(client: Any, length: int) -> None:
    texts = np.array([[b"a" * length, b"bc"], [b"", b"d"]], object)
    answer = client.infer("texts", [given(client, "text", texts, "BYTES")])
    expected = [[b"A" * length, b"BC"], [b"", b"D"]]
    assert answer.as_numpy("once").tolist() == answer.as_numpy("loud").tolist() == expected


def test_only_steps_for_what_is_asked_run(client: Any, server: Addresses) -> None:
    def executions() -> tuple[int, int]:
        return tuple(count(client, name) for name in ("added", "plus_one"))  # type: ignore[return-value]

    before = executions()
    wanted = [library(client).InferRequestedOutput("d")]
    answer = ask(client, "diamond", rows(WIDTHS["large"], 3), outputs=wanted)
    np.testing.assert_array_equal(answer.as_numpy("d"), rows(WIDTHS["large"], 6))
    assert executions() == before
    assert answer.as_numpy("y") is None


def statistics(client: Any, name: str) -> dict[str, Any]:
    if library(client) is tritonclient.http:
        (found,) = client.get_inference_statistics(name)["model_stats"]
    else:
        (found,) = client.get_inference_statistics(name, as_json=True)["model_stats"]
    return dict(found)


def count(client: Any, name: str, what: str = "success") -> int:
    return int(statistics(client, name)["inference_stats"][what].get("count", 0))


def test_requests_of_many_clients_are_merged_at_each_step(server: Addresses) -> None:
    def ask_often(number: int) -> bool:
        with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
            answers = []
            for width in (3, 1 << 14, 3, 1 << 14):
                x = rows(width, number)
                answers.append(np.array_equal(ask(client, "diamond", x).as_numpy("y"), x * 6 + 1))
            return all(answers)

    calls = [InBackground(ask_often, number) for number in range(16)]
    assert all(call.result() for call in calls)


def test_a_step_that_fails_fails_the_request(client: Any, server: Addresses) -> None:
    failed = count(client, "careful", "fail")
    before = metrics(server, 'nv_inference_request_failure{model="careful"')
    for width in WIDTHS.values():
        with pytest.raises(InferenceServerException, match="no negative numbers") as raised:
            ask(client, "careful", rows(width, -1))
        assert "in ensemble 'careful', " in str(raised.value)
        assert raised.value.status() in ("StatusCode.INTERNAL", "500")
        np.testing.assert_array_equal(ask(client, "careful", rows(width, 1)).as_numpy("y"), rows(width, 4))
    assert count(client, "careful", "fail") == failed + 2
    name = 'nv_inference_request_failure{model="careful",reason="OTHER",version="1"}'
    after = metrics(server, 'nv_inference_request_failure{model="careful"')
    assert after[name] - before.get(name, 0) == 2
    assert after.keys() == {name}


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("client", ["grpc"], indirect=True)  # each death makes the next start wait longer
def test_a_worker_that_dies_in_a_step_fails_the_request(client: Any, width: int) -> None:
    with pytest.raises(InferenceServerException, match="in ensemble 'careful', model 'picky': the worker"):
        ask(client, "careful", rows(width, 6.5))
    wait_until(lambda: client.is_model_ready("careful"), "a new worker")
    np.testing.assert_array_equal(ask(client, "careful", rows(width, 1)).as_numpy("y"), rows(width, 4))


def open_gate(fifo: Path) -> None:
    """Let who waits at the gate, now or soon, pass."""
    with open(fifo, "wb"):
        pass


def running(server: Addresses, model: str) -> bool:
    return f'gpuserve_running_requests{{model="{model}",version="1"}}' in blocks(server)


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_a_client_may_go_away(server: Addresses, fifo: Path, width: int) -> None:
    heard = threading.Event()
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        tensor = given(client, "x", rows(width, 1))
        call = client.async_infer("held", [tensor], lambda result, error: heard.set())
        wait_until(lambda: running(server, "Gate"), "the step runs")
        call.cancel()
        wait_until(lambda: not running(server, "held"), "the ensemble has let go")
        open_gate(fifo)
        assert heard.wait(TIMEOUT_S)
        assert count(client, "held", "fail")


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_a_request_has_one_limit_for_all_steps(
    client: Any, server: Addresses, fifo: Path, width: int
) -> None:
    with pytest.raises(InferenceServerException, match="Deadline Exceeded") as raised:
        ask(client, "held", rows(width, 1), timeout=200_000)
    assert "in ensemble 'held'" in str(raised.value)
    open_gate(fifo)


def test_parameters_and_priority_reach_every_step(client: Any) -> None:
    answer = ask(client, "parameters", rows(1, 1), parameters={"tone": "dry", "n": 3}, priority=1)
    for name in ("first", "second"):
        seen = json.loads(answer.as_numpy(name).item())
        assert {key: seen[key] for key in ("tone", "n")} == {"tone": "dry", "n": 3}


def test_a_sequence_goes_through_all_steps(client: Any) -> None:
    counts = [
        ask(client, "sequences", rows(1, 0), sequence_id=number, sequence_start=not n, sequence_end=n == 2)
        for n in range(3)
        for number in (71, 72)
    ]
    assert [one.as_numpy("y").item() for one in counts] == [1, 1, 2, 2, 3, 3]


def test_an_ensemble_streams_its_one_response(server: Addresses) -> None:
    heard: list[Any] = []
    with tritonclient.grpc.InferenceServerClient(server.grpc) as client:
        client.start_stream(lambda result, error: heard.append(error or result.as_numpy("y").flat[0]))
        for number in range(10):
            client.async_stream_infer("chain", [given(client, "x", rows(WIDTHS["large"], number))])
        wait_until(lambda: len(heard) == 10, "every response")
        client.stop_stream()
    assert heard == [2 * number + 1 for number in range(10)]


@pytest.mark.parametrize("width", WIDTHS.values(), ids=WIDTHS)
def test_what_a_step_leaves_out_is_missed_by_who_needs_it(client: Any, width: int) -> None:
    """As in Triton: optional inputs between steps stay optional (L0_optional_input)."""
    asked = library(client).InferRequestedOutput
    only_a = [given(client, "a", rows(width, 3))]
    answer = client.infer("partial", only_a)
    assert (answer.as_numpy("a_out").flat[0], answer.as_numpy("b_out")) == (3, None)
    named = client.infer("partial", only_a, outputs=[asked("a_out")])
    assert (named.as_numpy("a_out").flat[0], named.as_numpy("b_out")) == (3, None)
    both = [*only_a, given(client, "b", rows(width, 4))]
    assert client.infer("partial", both, outputs=[asked("b_out")]).as_numpy("b_out").flat[0] == 4
    with pytest.raises(InferenceServerException, match="model 'passed_on' gave no output 'b_out', which is"):
        client.infer("partial", only_a, outputs=[asked("b_out")])
    with pytest.raises(InferenceServerException, match=r"in ensemble 'demanding', .*'b'"):
        client.infer("demanding", only_a)


def test_it_is_described_as_an_ensemble(client: Any) -> None:
    as_json = {} if library(client) is tritonclient.http else {"as_json": True}
    metadata = client.get_model_metadata("chain", **as_json)
    assert metadata["platform"] == "ensemble"
    config = client.get_model_config("chain", **as_json)
    config = config.get("config", config)
    assert config["platform"] == "ensemble"
    steps = config["ensemble_scheduling"]["step"]
    assert [(one["model_name"], int(one["model_version"])) for one in steps] == [
        ("plus_one", -1),
        ("doubled", -1),
    ]
    assert steps[0]["input_map"] == {"x": "two"}
    assert steps[0]["output_map"] == {"y": "y"}
    assert not config.get("instance_group")


def test_its_own_statistics_add_up(client: Any) -> None:
    before = statistics(client, "fan")
    for rows_ in (1, 3):
        ask(client, "fan", rows(3, *[1.0] * rows_))
    after = statistics(client, "fan")
    for key, more in (("inference_count", 4), ("execution_count", 2)):
        assert int(after[key]) - int(before.get(key, 0)) == more
    success, queue = (after["inference_stats"][key] for key in ("success", "queue"))
    assert int(success["count"]) == int(queue["count"])
    assert int(success["ns"]) > 0


def test_a_request_is_checked_before_any_step(client: Any) -> None:
    with pytest.raises(InferenceServerException, match="unexpected inference input 'z' for model 'chain'"):
        client.infer("chain", [given(client, "z", rows(1, 1))])
    with pytest.raises(InferenceServerException, match="batch-size must be <= 8 for 'chain'"):
        ask(client, "chain", rows(1, *range(9)))


def test_a_body_comes_back_to_a_client_that_stopped_sending(server: Addresses) -> None:
    import socket

    host, port = server.http.split(":")
    head = (
        b"POST /v2/models/chain/infer HTTP/1.1\r\nHost: x\r\nContent-Length: 4194500\r\n"
        b"Inference-Header-Content-Length: 96\r\n\r\n"
    )
    tensors = {"name": "x", "shape": [1, 1 << 20], "datatype": "FP32"}
    text = json.dumps({"inputs": [{**tensors, "parameters": {"binary_data_size": 4 << 20}}]}).ljust(196)
    head = head.replace(b"4194500", str(len(text) + (4 << 20)).encode()).replace(
        b" 96", f" {len(text)}".encode()
    )
    with socket.create_connection((host, int(port))) as peer:
        peer.sendall(head + text.encode() + bytes(1 << 20))
        wait_until(lambda: blocks(server), "memory for the input")
    wait_until(lambda: not blocks(server), "it is given back")
