"""Callables in threads of the program: they ask each other, and memory that shrinks ends nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc
from bound import FLOATS_IN_AND_OUT, Refused, ask, free_server, infer
from leaks import own_name
from tritonclient.utils import InferenceServerException

from gpuserve import ModelCallError, Request, Server, current_model
from gpuserve.decorators import batch

LARGE = 64 * 1024


@batch
def doubled(INPUT_1: Any) -> Any:
    return {"OUTPUT_1": INPUT_1 * 2}


def asks(requests: list[Request]) -> Any:
    model = current_model()
    answers = [model.infer("doubled", {"INPUT_1": one["INPUT_1"]}) for one in requests]
    return [{"OUTPUT_1": one["OUTPUT_1"] + 1} for one in answers]


def asks_itself(requests: list[Request]) -> Any:
    try:
        return [current_model().infer("asks_itself", one.data) for one in requests]
    except ModelCallError as error:
        raise ValueError(f"it was told: {error.code.value}") from None


@pytest.fixture
def server() -> Iterator[Server]:
    with free_server() as made:
        for callable_ in (doubled, asks, asks_itself):
            made.bind(callable_.__name__, callable_, **FLOATS_IN_AND_OUT, isolation="thread")
        made.bind("process", asks, **FLOATS_IN_AND_OUT)
        made.run()
        yield made


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["asks", "process"])
def test_threads_and_processes_ask_threads(server: Server, model: str) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda n: ask(server, model, n), range(40)))
    assert answers == [[2 * n + 1] for n in range(40)]
    large = np.full((1, LARGE), 3, np.float32)
    assert (infer(server, model, INPUT_1=large)["OUTPUT_1"] == 7).all()


def test_a_thread_that_asks_itself_is_refused(server: Server) -> None:
    with pytest.raises(Refused, match="it was told: UNAVAILABLE"):
        ask(server, "asks_itself", 1)


def test_memory_that_shrinks_ends_nothing(server: Server) -> None:
    file = Path("/dev/shm") / own_name()
    x = np.arange(LARGE, dtype=np.float32).reshape(1, -1)
    file.write_bytes(x.tobytes())
    address = server.addresses["grpc"].rpartition("/")[2]
    try:
        with tritonclient.grpc.InferenceServerClient(address) as client:
            client.register_system_shared_memory("r", f"/{file.name}", x.nbytes)
            tensor = tritonclient.grpc.InferInput("INPUT_1", x.shape, "FP32")
            tensor.set_shared_memory("r", x.nbytes)
            assert (client.infer("doubled", [tensor]).as_numpy("OUTPUT_1") == 2 * x).all()
            os.truncate(file, 4096)
            with pytest.raises(InferenceServerException, match="has shrunk since it was registered"):
                client.infer("doubled", [tensor])
            client.unregister_system_shared_memory()
    finally:
        file.unlink()
    assert ask(server, "doubled", 2) == [4]
