"""``bind()``: what can be served, in which process it runs, what it is given, what a client gets."""

from __future__ import annotations

import functools
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bound import (
    FLOATS,
    FLOATS_IN_AND_OUT,
    TIMEOUT_S,
    UNBATCHED,
    InBackground,
    Refused,
    ask,
    free_server,
    infer,
    status,
)
from exploring import variants
from processes import children, command_line

from gpuserve import DynamicBatcher, ModelConfig, Request, Server, Tensor
from gpuserve.decorators import batch, sample
from gpuserve.errors import BindError, StartupError


@pytest.fixture
def server() -> Iterator[Server]:
    with free_server() as one:
        yield one


def plus_one(requests: list[Request]) -> list[dict[str, Any]]:
    return [{"OUTPUT_1": one["INPUT_1"] + 1} for one in requests]


@batch
def tell_pid(INPUT_1: Any) -> Any:
    return np.full((len(INPUT_1), 1), os.getpid(), np.int64)


class Adder:
    def __init__(self, amount: float = 5.0) -> None:
        self.amount = np.full(1, amount, np.float32)

    def __call__(self, requests: list[Request]) -> list[dict[str, Any]]:
        return [{"OUTPUT_1": one["INPUT_1"] + self.amount} for one in requests]

    @batch
    def add(self, **inputs: Any) -> dict[str, Any]:
        return {"OUTPUT_1": inputs["INPUT_1"] + self.amount}


def add(requests: list[Request], amount: float) -> list[dict[str, Any]]:
    return [{"OUTPUT_1": one["INPUT_1"] + np.float32(amount)} for one in requests]


@batch
def add_batched(INPUT_1: Any, amount: float) -> list[Any]:
    return [INPUT_1 + np.float32(amount)]


# ---- what can be bound --------------------------------------------------------------------------


def test_every_kind_of_callable(server: Server) -> None:
    weights = np.arange(100_000, dtype=np.float32)  # more than a datagram holds

    def nested(requests: list[Request]) -> list[dict[str, Any]]:
        return [{"OUTPUT_1": one["INPUT_1"] + weights[7]} for one in requests]

    callables = {
        "identity": (lambda requests: requests, 1),
        "function": (plus_one, 2),
        "nested": (nested, 8),
        "instance": (Adder(), 6),
        "method": (Adder(6.0).add, 7),
        "class": (Adder, 6),
        "partial": (functools.partial(add, amount=3.0), 4),
        "batched-partial": (functools.partial(add_batched, amount=2.0), 3),
        "function.with_default-9": (lambda some, device="cuda": some, 1),
    }
    for name, (infer_func, _) in callables.items():
        server.bind(name, infer_func, **FLOATS_IN_AND_OUT)
    server.run()
    assert {name: ask(server, name, 1.0) for name in callables} == {
        name: [expected] for name, (_, expected) in callables.items()
    }


def test_each_model_runs_in_a_process_of_its_own(server: Server) -> None:
    pids = {"inputs": [FLOATS], "outputs": [Tensor((1,), np.int64)]}
    server.bind("one", tell_pid, **pids)
    server.bind("two", tell_pid, **pids)
    server.run()
    workers = [pid for pid in children(os.getpid()) if "gpuserve_worker" in command_line(pid)]
    answered = [ask(server, name, 0.0)[0] for name in ("one", "two")]
    assert sorted(answered) == sorted(workers)
    assert len(workers) == 2


def test_a_list_is_one_worker_an_element_and_requests_go_to_whichever_has_room(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as gate:
        gate.settimeout(TIMEOUT_S)
        port = gate.getsockname()[1]

        def gated(name: int) -> Any:
            @batch
            def call(INPUT_1: Any) -> Any:
                with socket.create_connection(("127.0.0.1", port)) as waiting:
                    waiting.recv(1)  # until both instances are in their calls
                return np.full((len(INPUT_1), 2), (name, os.getpid()), np.int64)

            return call

        server.bind(
            "gated",
            [gated(1), gated(2)],
            inputs=[FLOATS],
            outputs=[Tensor((2,), np.int64)],
            config=ModelConfig(max_batch_size=1),
        )
        server.run()
        asked = [InBackground(ask, server, "gated", 0.0) for _ in range(2)]
        waiting = [gate.accept()[0] for _ in asked]
        for one in waiting:
            one.close()
        answers = sorted(one.result() for one in asked)
    assert [name for name, _ in answers] == [1, 2]
    assert len({pid for _, pid in answers}) == 2


@pytest.mark.thorough
def test_a_closure_over_a_large_array_is_held_once_by_its_worker(server: Server) -> None:
    nbytes = 200 << 20
    weights = np.ones(nbytes, np.uint8)

    @batch
    def resident(INPUT_1: Any) -> Any:
        status = Path("/proc/self/status").read_text()
        anonymous_kib = int(status.split("RssAnon:")[1].split()[0])
        return np.full((len(INPUT_1), 2), (anonymous_kib << 10, int(weights[-1])), np.int64)

    server.bind("large", resident, inputs=[FLOATS], outputs=[Tensor((2,), np.int64)])
    server.run()
    held_nbytes, last = ask(server, "large", 0.0)
    assert last == 1
    assert nbytes <= held_nbytes < 1.5 * nbytes


# ---- what it is given, what the client gets -----------------------------------------------------


def test_requests_have_data_parameters_and_mapping_access(server: Server) -> None:
    def look(requests: list[Request]) -> list[dict[str, Any]]:
        (one,) = requests
        same = one.data["a"] is one["a"] and list(one) == ["a"] and len(one) == 1
        seen = f"{one.parameters['mode']} {one.parameters['times']} {same}"
        return [{"text": np.array([[seen]], dtype=object)}]

    server.bind("look", look, [Tensor((-1,), "FP32", name="a")], [Tensor((1,), bytes, name="text")])
    server.run()
    outputs = infer(server, "look", {"mode": "fast", "times": 3}, a=np.zeros((1, 2), np.float32))
    assert outputs["text"].tolist() == [["fast 3 True"]]


def test_default_names_count_from_one_and_dtypes_are_types_dtypes_or_strings(server: Server) -> None:
    @batch
    def add_all(INPUT_1: Any, INPUT_2: Any, INPUT_3: Any, INPUT_4: Any) -> list[Any]:
        assert [str(one.dtype) for one in (INPUT_1, INPUT_2, INPUT_3, INPUT_4)] == [
            "float32",
            "int16",
            "float64",
            "bool",
        ]
        return [INPUT_1 + INPUT_2, INPUT_3]

    inputs = [
        Tensor((1,), np.float32),
        Tensor((1,), np.dtype("int16")),
        Tensor((1,), "float64"),
        Tensor((1,), bool),
    ]
    server.bind("m", add_all, inputs, [Tensor((1,), "TYPE_FP32"), Tensor((1,), np.float64)])
    server.run()
    given = {
        "INPUT_1": np.array([[1.5]], np.float32),
        "INPUT_2": np.array([[2]], np.int16),
        "INPUT_3": np.array([[0.25]]),
        "INPUT_4": np.array([[True]]),
    }
    outputs = infer(server, "m", **given)
    assert {name: one.tolist() for name, one in outputs.items()} == {
        "OUTPUT_1": [[3.5]],
        "OUTPUT_2": [[0.25]],
    }


def test_a_sample_has_no_batch_axis(server: Server) -> None:
    @sample
    def total(INPUT_1: Any) -> Any:
        return [INPUT_1.sum(axis=0), np.float32(INPUT_1.ndim)]

    outputs = [Tensor((-1,), np.float32), Tensor((), np.float32)]
    server.bind("m", total, [Tensor((-1, 2), np.float32)], outputs, config=UNBATCHED)
    server.run()
    answer = infer(server, "m", INPUT_1=np.array([[1, 2], [3, 4]], np.float32))
    assert answer["OUTPUT_1"].tolist() == [4, 6]
    assert (answer["OUTPUT_2"].shape, float(answer["OUTPUT_2"])) == ((), 2)


@pytest.mark.parametrize("dtype", variants(bytes, np.bytes_, object, np.object_, "bytes", "string"))
def test_bytes_of_every_spelling(server: Server, dtype: Any) -> None:
    @batch
    def shout(INPUT_1: Any) -> Any:
        return np.array([[one.upper() for one in row] for row in INPUT_1], dtype=object)

    server.bind("m", shout, [Tensor((-1,), dtype)], [Tensor((-1,), dtype)])
    server.run()
    (output,) = infer(server, "m", INPUT_1=np.array([["ab", "x\0"]], dtype=object)).values()
    assert output.tolist() == [["AB", "X\0"]]


def test_models_without_inputs(server: Server) -> None:
    def clock(requests: list[Request]) -> list[dict[str, Any]]:
        return [{"OUTPUT_1": np.array([7], np.float32)} for _ in requests]

    server.bind("clock", clock, inputs=[], outputs=[FLOATS], config=UNBATCHED)
    server.run()
    assert infer(server, "clock")["OUTPUT_1"].tolist() == [7]


def test_without_a_batcher_requests_keep_their_batch_and_are_not_merged(server: Server) -> None:
    def count(requests: list[Request]) -> list[dict[str, Any]]:
        return [
            {"OUTPUT_1": np.full((len(one["INPUT_1"]), 1), len(requests), np.float32)} for one in requests
        ]

    server.bind("m", count, **FLOATS_IN_AND_OUT, config=ModelConfig(max_batch_size=8, batcher=None))
    server.run()
    answer = infer(server, "m", INPUT_1=np.zeros((3, 1), np.float32))
    assert answer["OUTPUT_1"].tolist() == [[1], [1], [1]]


def test_preferred_sizes_are_taken(server: Server) -> None:
    batcher = DynamicBatcher(max_queue_delay_microseconds=100, preferred_batch_size=[2, 4])
    server.bind("m", plus_one, **FLOATS_IN_AND_OUT, config=ModelConfig(max_batch_size=4, batcher=batcher))
    server.run()
    assert ask(server, "m", 1.0) == [2]


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        pytest.param({"other": np.ones((1, 1), np.float32)}, "'other' is not declared", id="name"),
        pytest.param(
            {"OUTPUT_1": np.ones((1, 1), np.float64)}, "must be FP32", id="dtype", marks=pytest.mark.thorough
        ),
        pytest.param(
            {"OUTPUT_1": np.ones((1, 3), np.float32)},
            r"must have shape (1,)",
            id="shape",
            marks=pytest.mark.thorough,
        ),
    ],
)
def test_strict_finds_answers_that_do_not_fit(server: Server, answer: dict[str, Any], complaint: str) -> None:
    declared = {"inputs": [FLOATS], "outputs": [Tensor((1,), np.float32)]}
    server.bind("strict", lambda requests: [answer], **declared, strict=True)
    server.bind("lenient", lambda requests: [answer], **declared)
    server.run()
    with pytest.raises(Refused) as refused:
        ask(server, "strict", 1.0)
    assert refused.value.status == 500
    assert complaint in refused.value.text
    assert len(ask(server, "lenient", 1.0)) == next(iter(answer.values())).shape[1]


# ---- binding to a server that runs --------------------------------------------------------------


def test_models_are_bound_to_a_running_server(server: Server) -> None:
    server.run()
    server.bind("late", plus_one, **FLOATS_IN_AND_OUT)
    assert ask(server, "late", 1.0) == [2]
    server.bind("later", [plus_one, plus_one], **FLOATS_IN_AND_OUT)
    assert ask(server, "later", 2.0) == [3]
    assert status(server, "/v2/health/ready") == 200


def test_a_model_that_cannot_be_loaded_leaves_the_server_and_its_name_free(server: Server) -> None:
    class Broken:
        def __init__(self) -> None:
            raise RuntimeError("no weights here")

    server.bind("good", plus_one, **FLOATS_IN_AND_OUT)
    server.run()
    with pytest.raises(StartupError, match=r"'bad'.* no weights here"):
        server.bind("bad", Broken, **FLOATS_IN_AND_OUT)
    assert ask(server, "good", 1.0) == [2]
    assert status(server, "/v2/models/bad/ready") in {400, 404}
    assert status(server, "/v2/health/ready") == 200
    server.bind("bad", plus_one, **FLOATS_IN_AND_OUT)
    assert ask(server, "bad", 1.0) == [2]


def test_a_name_is_bound_once(server: Server) -> None:
    server.bind("Model", plus_one, **FLOATS_IN_AND_OUT)
    with pytest.raises(BindError, match="same name twice: 'model'"):
        server.bind("model", plus_one, **FLOATS_IN_AND_OUT)


def generator(requests: list[Request]) -> Any:
    yield requests


class MakesGenerators:
    def __call__(self, requests: list[Request]) -> Any:
        yield requests


def test_a_generator_is_refused_for_a_model_with_one_answer(server: Server) -> None:
    with pytest.raises(BindError, match=r"is a generator, .*: say decoupled=True"):
        server.bind("m", generator, **FLOATS_IN_AND_OUT)


def test_one_that_a_class_makes_is_refused_at_the_start(server: Server) -> None:
    server.bind("m", MakesGenerators, **FLOATS_IN_AND_OUT)
    with pytest.raises(StartupError, match="the model is not decoupled"):
        server.run()
    assert not server.is_alive()
