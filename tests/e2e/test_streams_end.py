"""What becomes of open streams when their server ends, and of a client that sends and never reads."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from bound import free_server
from config_file import write_config
from serving import GPUSERVE, serving
from test_streams import PATH, Stream, entry
from tritonclient.grpc import service_pb2 as pb

from gpuserve import ModelConfig, Tensor

DRAIN_S = 0.5
#: What is late by less than this is on time: the machine may be busy.
ON_TIME_S = 10.0


@pytest.fixture
def config(tmp_path: Path) -> Path:
    models = [entry(name, decoupled=True) for name in ("count", "endless", "swallows_cancellation")]
    models.append(entry("sleeps"))
    return write_config(tmp_path, models, host="127.0.0.1", drain_timeout_s=DRAIN_S)


def ended_after(config: Path, *models: str) -> float:
    """Seconds from SIGTERM to the exit of a server with one stream, which asked these models."""
    with serving(GPUSERVE, "serve", str(config)) as server:
        stream = Stream(server.grpc)
        for model in models:
            stream.ask(model, 1)
            if model != "sleeps":
                stream.hear()
        started = time.monotonic()
    took_s = time.monotonic() - started
    stream.client.stop_stream(cancel_requests=True)
    stream.client.close()
    return took_s


def test_an_idle_stream_holds_nobody_up(config: Path) -> None:
    assert ended_after(config, "count") < ON_TIME_S


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["endless", "swallows_cancellation", "sleeps"])
def test_what_would_never_end_is_cut_after_the_drain(config: Path, model: str) -> None:
    assert ended_after(config, model) < DRAIN_S + ON_TIME_S + 1.0


def test_who_sends_and_never_reads_is_not_asked_for_more() -> None:
    """The front takes requests off a connection only while their answers are read."""
    with free_server() as server:
        tensor = Tensor((-1,), np.int32, name="x")
        config = ModelConfig(batching=False)
        server.bind(
            "echo", lambda requests: [one.data for one in requests], [tensor], [tensor], config=config
        )
        server.run()
        request = pb.ModelInferRequest(model_name="echo")
        request.inputs.add(name="x", datatype="INT32", shape=[1 << 14])
        request.raw_input_contents.append(bytes(4 << 14))
        sent = itertools.count()
        stop = threading.Event()

        def requests() -> Iterator[Any]:
            while not stop.is_set() and next(sent) < 4096:
                yield request

        with grpc.insecure_channel(server.addresses["grpc"]) as channel:
            call = channel.stream_stream(PATH, pb.ModelInferRequest.SerializeToString)(requests())
            before = -1
            while before != (before := next(sent)) - 1:  # until no more are taken
                stop.wait(1.0)
            stop.set()
            call.cancel()
        assert before * (4 << 14) < 128 << 20
