"""``bind()``: what can be served, in which process it runs, what it is given, what a client gets."""

from __future__ import annotations

import functools
import os
import signal
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
from processes import children, command_line, wait_ended

from gpuserve import DynamicBatcher, ModelConfig, Request, Server, Tensor
from gpuserve.core.errors import BindError, StartupError
from gpuserve.decorators import batch, sample


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


@pytest.mark.thorough
def test_each_model_runs_in_a_process_of_its_own(server: Server) -> None:
    pids = {"inputs": [FLOATS], "outputs": [Tensor((1,), np.int64)]}
    server.bind("one", tell_pid, **pids)
    server.bind("two", tell_pid, **pids)
    before = children(os.getpid())
    server.run()
    started = [pid for pid in children(os.getpid()) if pid not in before]
    workers = [pid for pid in started if "gpuserve_worker" in command_line(pid)]
    answered = [ask(server, name, 0.0)[0] for name in ("one", "two")]
    assert sorted(answered) == sorted(workers)
    assert len(workers) == 2


@pytest.mark.thorough
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


@pytest.mark.parametrize("attached", variants(False, True))
@pytest.mark.parametrize("library", variants("numpy", "torch"))
def test_instances_and_restarts_map_one_copy_of_an_array(
    server: Server, library: str, attached: bool
) -> None:
    nbytes = 64 << 20
    weights: Any = np.ones(nbytes, np.uint8)
    if library == "torch":
        weights = pytest.importorskip("torch").from_numpy(weights)
    # Tensors over one storage share it in the worker as well.
    tied = weights if library == "numpy" else weights.view(2, -1)[0]

    @batch
    def resident(INPUT_1: Any) -> Any:
        """Return the process id, the own bytes, and two elements. Write to one of them."""
        first = int(weights[1]) + int(weights[:: 1 << 12].sum()) * 0
        tied[1] = 7
        status = Path("/proc/self/status").read_text()
        anonymous_kib = int(status.split("RssAnon:")[1].split()[0])
        row = os.getpid(), anonymous_kib << 10, first, int(weights[1])
        return np.full((len(INPUT_1), 4), row, np.int64)

    server.run()
    with Server.attach(server.addresses["http"]) if attached else server as host:
        host.bind("large", [resident, resident], inputs=[FLOATS], outputs=[Tensor((4,), np.int64)])
        for _ in range(2):
            pid, own_nbytes, before, after = ask(server, "large", 0.0)
            assert own_nbytes < nbytes + (0 if library == "numpy" else 200 << 20)
            assert (before, after) == (1, 7)  # a write is seen by its own instance, and by no successor
            os.kill(pid, signal.SIGKILL)
            assert not wait_ended([pid], TIMEOUT_S)


# ---- what it is given, what the client gets -----------------------------------------------------


def look(requests: list[Request]) -> list[dict[str, Any]]:
    (one,) = requests
    same = one.data["a"] is one["a"] and list(one) == ["a"] and len(one) == 1
    seen = f"{one.parameters['mode']} {one.parameters['times']} {same}"
    return [{"text": np.array([[seen]], dtype=object)}]


@batch
def add_all(INPUT_1: Any, INPUT_2: Any, INPUT_3: Any, INPUT_4: Any) -> list[Any]:
    dtypes = [str(one.dtype) for one in (INPUT_1, INPUT_2, INPUT_3, INPUT_4)]
    assert dtypes == ["float32", "int16", "float64", "bool"]
    return [INPUT_1 + INPUT_2, INPUT_3]


@sample
def total(INPUT_1: Any) -> Any:
    return [INPUT_1.sum(axis=0), np.float32(INPUT_1.ndim)]


@batch
def shout(**inputs: Any) -> list[Any]:
    return [np.array([[text.upper() for text in row] for row in one], object) for one in inputs.values()]


def seven(requests: list[Request]) -> list[dict[str, Any]]:
    return [{"OUTPUT_1": np.array([7], np.float32)} for _ in requests]


def count(requests: list[Request]) -> list[dict[str, Any]]:
    return [{"OUTPUT_1": np.full((len(one["INPUT_1"]), 1), len(requests), np.float32)} for one in requests]


ANSWERS = {
    "name": {"other": np.ones((1, 1), np.float32)},
    "dtype": {"OUTPUT_1": np.ones((1, 1), np.float64)},
    "shape": {"OUTPUT_1": np.ones((1, 3), np.float32)},
}


@batch
def unfit(INPUT_1: Any, which: Any) -> dict[str, Any]:
    return ANSWERS[which[0, 0].decode()]


DTYPES = [np.float32, np.dtype("int16"), "float64", bool]
SPELLINGS = bytes, np.bytes_, object, np.object_, "bytes", "string"
PREFERRED = DynamicBatcher(max_queue_delay_microseconds=100, preferred_batch_size=[2, 4])
UNFIT: dict[str, Any] = {
    "infer_func": unfit,
    "inputs": [FLOATS, Tensor((1,), bytes, name="which")],
    "outputs": [Tensor((1,), np.float32)],
}
#: name -> what ``bind`` is given
MODELS: dict[str, dict[str, Any]] = {
    "look": {
        "infer_func": look,
        "inputs": [Tensor((-1,), "FP32", name="a")],
        "outputs": [Tensor((1,), bytes, name="text")],
    },
    "add_all": {
        "infer_func": add_all,
        "inputs": [Tensor((1,), dtype) for dtype in DTYPES],
        "outputs": [Tensor((1,), "TYPE_FP32"), Tensor((1,), np.float64)],
    },
    "total": {
        "infer_func": total,
        "inputs": [Tensor((-1, 2), np.float32)],
        "outputs": [Tensor((-1,), np.float32), Tensor((), np.float32)],
        "config": UNBATCHED,
    },
    "shout": {
        "infer_func": shout,
        "inputs": [Tensor((-1,), dtype) for dtype in SPELLINGS],
        "outputs": [Tensor((-1,), dtype) for dtype in SPELLINGS],
    },
    "seven": {"infer_func": seven, "inputs": [], "outputs": [FLOATS], "config": UNBATCHED},
    "count": {
        "infer_func": count,
        **FLOATS_IN_AND_OUT,
        "config": ModelConfig(max_batch_size=8, batcher=None),
    },
    "preferred": {
        "infer_func": plus_one,
        **FLOATS_IN_AND_OUT,
        "config": ModelConfig(max_batch_size=4, batcher=PREFERRED),
    },
    "strict": UNFIT,
    "lenient": {**UNFIT, "strict": False},
}


@pytest.fixture(scope="module")
def of_models() -> Iterator[Server]:
    """A server of all ``MODELS``."""
    with free_server() as one:
        for name, given in MODELS.items():
            one.bind(name, **given)
        one.run()
        yield one


def test_requests_have_data_parameters_and_mapping_access(of_models: Server) -> None:
    outputs = infer(of_models, "look", {"mode": "fast", "times": 3}, a=np.zeros((1, 2), np.float32))
    assert outputs["text"].tolist() == [["fast 3 True"]]


def test_default_names_count_from_one_and_dtypes_are_types_dtypes_or_strings(of_models: Server) -> None:
    given = {
        "INPUT_1": np.array([[1.5]], np.float32),
        "INPUT_2": np.array([[2]], np.int16),
        "INPUT_3": np.array([[0.25]]),
        "INPUT_4": np.array([[True]]),
    }
    outputs = infer(of_models, "add_all", **given)
    assert {name: one.tolist() for name, one in outputs.items()} == {
        "OUTPUT_1": [[3.5]],
        "OUTPUT_2": [[0.25]],
    }


def test_a_sample_has_no_batch_axis(of_models: Server) -> None:
    answer = infer(of_models, "total", INPUT_1=np.array([[1, 2], [3, 4]], np.float32))
    assert answer["OUTPUT_1"].tolist() == [4, 6]
    assert (answer["OUTPUT_2"].shape, float(answer["OUTPUT_2"])) == ((), 2)


def test_bytes_of_every_spelling(of_models: Server) -> None:
    given = {f"INPUT_{n + 1}": np.array([[f"a{n}", "x\0"]], object) for n in range(len(SPELLINGS))}
    outputs = infer(of_models, "shout", **given)
    assert [one.tolist() for one in outputs.values()] == [[[f"A{n}", "X\0"]] for n in range(len(SPELLINGS))]


def test_models_without_inputs(of_models: Server) -> None:
    assert infer(of_models, "seven")["OUTPUT_1"].tolist() == [7]


def test_without_a_batcher_requests_keep_their_batch_and_are_not_merged(of_models: Server) -> None:
    answer = infer(of_models, "count", INPUT_1=np.zeros((3, 1), np.float32))
    assert answer["OUTPUT_1"].tolist() == [[1], [1], [1]]


def test_preferred_sizes_are_taken(of_models: Server) -> None:
    assert ask(of_models, "preferred", 1.0) == [2]


@pytest.mark.parametrize(
    ("which", "complaint"),
    [
        ("name", "'other' is not declared"),
        ("dtype", "must be FP32"),
        ("shape", "must have shape (1,)"),
    ],
)
def test_strict_finds_answers_that_do_not_fit(of_models: Server, which: str, complaint: str) -> None:
    given = {"INPUT_1": np.ones((1, 1), np.float32), "which": np.array([[which]], dtype=object)}
    with pytest.raises(Refused) as refused:
        infer(of_models, "strict", **given)
    assert refused.value.status == 500
    assert complaint in refused.value.text
    if which == "name":  # without any declared output there is no answer, strict or not
        with pytest.raises(Refused, match="None of the returned outputs 'other' is declared"):
            infer(of_models, "lenient", **given)
        return
    (answer,) = infer(of_models, "lenient", **given).values()
    np.testing.assert_array_equal(answer, ANSWERS[which]["OUTPUT_1"])


# ---- binding to a server that runs --------------------------------------------------------------


def test_models_are_bound_to_a_running_server(server: Server) -> None:
    server.run()
    server.bind("late", plus_one, **FLOATS_IN_AND_OUT)
    assert ask(server, "late", 1.0) == [2]
    server.bind("later", [plus_one, plus_one], **FLOATS_IN_AND_OUT)
    assert ask(server, "later", 2.0) == [3]
    assert status(server, "/v2/health/ready") == 200


@pytest.mark.thorough
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


def test_a_callable_that_cannot_be_called_with_requests_is_refused(server: Server) -> None:
    with pytest.raises(BindError, match=r"a list of requests, but the call fails: missing .* 'y'; @batch"):
        server.bind("two", lambda x, y: None, **FLOATS_IN_AND_OUT)


def generator(requests: list[Request]) -> Any:
    yield requests


class MakesGenerators:
    def __call__(self, requests: list[Request]) -> Any:
        yield requests


def test_a_generator_is_refused_for_a_model_with_one_answer(server: Server) -> None:
    with pytest.raises(BindError, match=r"is a generator, .*: say decoupled=True"):
        server.bind("m", generator, **FLOATS_IN_AND_OUT)


@pytest.mark.thorough
def test_one_that_a_class_makes_is_refused_at_the_start(server: Server) -> None:
    server.bind("m", MakesGenerators, **FLOATS_IN_AND_OUT)
    with pytest.raises(StartupError, match="the model is not decoupled"):
        server.run()
    assert not server.is_alive()
