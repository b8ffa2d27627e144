"""gRPC over the server's own HTTP/2, by the client of gRPC itself."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from config_file import model, models, tensor, write_config
from operated import OperatedServer
from processes import wait_until
from sending import INFER, TIMEOUT_S, message
from tritonclient.grpc import service_pb2

MIB = 1 << 20
LIMIT_NBYTES = 80 * MIB
UNLIMITED = (("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OperatedServer]:
    """echo_FP32, and ``patient``: its requests wait for a batch that never fills."""
    entries = [one for one in models() if one["name"] in {"echo_FP32", "echo_BYTES"}]
    waits = {"batching": {"max_queue_delay_us": 30_000_000, "preferred_batch_sizes": [64]}}
    entries += [model("patient", "echo", [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)], 64, **waits)]
    entries += [model("complains", "complains", [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)], 4)]
    settings = {"host": "127.0.0.1", "transport": "native", "max_request_nbytes": LIMIT_NBYTES}
    config = write_config(tmp_path_factory.mktemp("grpc"), entries, **settings)
    with OperatedServer(config).until_ended() as started:
        yield started


class Channel:
    """A channel of its own connection, that knows whether the connection was ever lost."""

    def __init__(self, server: OperatedServer, **options: int) -> None:
        own = (("grpc.use_local_subchannel_pool", 1), *UNLIMITED, *options.items())
        dotted = [(name if "." in name else "grpc." + name, value) for name, value in own]
        self.channel = grpc.insecure_channel(server.addresses["gRPC"], dotted)
        self.states: list[Any] = []
        self.channel.subscribe(self.states.append)
        grpc.channel_ready_future(self.channel).result(TIMEOUT_S)
        self.infer = self.channel.unary_unary(
            INFER, lambda raw: raw, service_pb2.ModelInferResponse.FromString
        )

    def __enter__(self) -> Channel:
        return self

    def __exit__(self, *_: object) -> None:
        self.channel.close()

    @property
    def was_lost(self) -> bool:
        after = self.states[self.states.index(grpc.ChannelConnectivity.READY) :]
        return set(after) != {grpc.ChannelConnectivity.READY}


@pytest.fixture
def channel(server: OperatedServer) -> Iterator[Channel]:
    with Channel(server) as made:
        yield made
        assert made.infer(message().SerializeToString(), timeout=TIMEOUT_S).model_name == "echo_FP32"
        assert not made.was_lost
    wait_until(lambda: server.metric("gpuserve_arena_blocks") == 0, "the arena is empty", TIMEOUT_S)


def large(nbytes: int) -> tuple[bytes, np.ndarray[Any, Any]]:
    array = np.random.default_rng(nbytes).random(nbytes // 4, np.float32)
    return message("echo_FP32", 1, len(array), raw=array.tobytes()).SerializeToString(), array


@pytest.mark.thorough
def test_64_mib_both_ways(channel: Channel) -> None:
    body, array = large(64 * MIB)
    for _ in range(2):
        answer = channel.infer(body, timeout=TIMEOUT_S)
        assert answer.raw_output_contents[0] == array.tobytes()


def test_many_large_ones_at_once(channel: Channel) -> None:
    sent = [large(size) for size in (MIB, 3 * MIB, 70_000, 16_000, 5 * MIB, 200_000)] * 2
    calls = [channel.infer.future(body, timeout=TIMEOUT_S) for body, _ in sent]
    for call, (_, array) in zip(calls, sent, strict=True):
        assert call.result().raw_output_contents[0] == array.tobytes()


@pytest.mark.parametrize("nbytes", [1_000, 20_000, 70_000, 200_000, 300_000])
def test_messages_of_all_sizes_are_read_the_same(channel: Channel, nbytes: int) -> None:
    body, array = large(nbytes)
    for _ in range(2):  # the second one by what is known of the first
        assert channel.infer(body, timeout=TIMEOUT_S).raw_output_contents[0] == array.tobytes()

    typed = service_pb2.ModelInferRequest.FromString(body)
    typed.ClearField("raw_input_contents")
    typed.inputs[0].contents.fp32_contents.extend(array)
    answer = channel.infer(typed.SerializeToString(), timeout=TIMEOUT_S)
    assert answer.raw_output_contents[0] == array.tobytes()

    short = struct.pack("<I", 4) + b"text"
    strings = message("echo_BYTES", 1, nbytes // 8, raw=short * (nbytes // 8))
    strings.inputs[0].datatype = "BYTES"
    answer = channel.infer(strings.SerializeToString(), timeout=TIMEOUT_S)
    assert answer.raw_output_contents[0] == strings.raw_input_contents[0]
    assert "the request body is not a ModelInferRequest" in refusal(channel, body + b"\0")
    strings.raw_input_contents[0] = strings.raw_input_contents[0][:-1] + b"!!"
    wrong = strings.SerializeToString()
    assert "got 1 bytes after them" in refusal(channel, wrong)
    assert "the request body is not a ModelInferRequest" in refusal(channel, body[:-4])

    method = INFER.replace("ModelInfer", "ModelStreamInfer")
    parse = service_pb2.ModelStreamInferResponse.FromString
    infer_in_stream = channel.channel.stream_stream(method, lambda raw: raw, parse)
    sent = [body, typed.SerializeToString(), wrong, body[:-4]]
    first, second, third, fourth = infer_in_stream(iter(sent), timeout=TIMEOUT_S)
    for one in (first, second):
        assert one.infer_response.raw_output_contents[0] == array.tobytes()
    assert "got 1 bytes after them" in third.error_message
    assert "the request body is not a ModelInferRequest" in fourth.error_message


def refusal(channel: Channel, body: bytes) -> str:
    """The error text of a request that is INVALID_ARGUMENT."""
    with pytest.raises(grpc.RpcError) as caught:
        channel.infer(body, timeout=TIMEOUT_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return str(caught.value.details())


def test_metadata_of_every_kind(channel: Channel) -> None:
    many = [(f"x-{n}", "v" * n) for n in range(200)] + [
        ("x-bin", bytes(range(256))),
        ("x-long", "w" * 20_000),
    ]
    for _ in range(3):
        answer, call = channel.infer.with_call(
            message().SerializeToString(), metadata=many, timeout=TIMEOUT_S
        )
        assert answer.model_name == "echo_FP32"
        assert call.code() == grpc.StatusCode.OK


def test_deadlines(channel: Channel, server: OperatedServer) -> None:
    body = message("patient").SerializeToString()
    calls = [channel.infer.future(body, timeout=0.01 * n) for n in range(1, 30)]
    for call in calls:
        assert call.exception(TIMEOUT_S).code() == grpc.StatusCode.DEADLINE_EXCEEDED
    wait_until(lambda: server.metric("gpuserve_queue_size", model="patient") == 0, "nothing waits")


def test_cancels_in_a_row(channel: Channel, server: OperatedServer) -> None:
    body = message("patient").SerializeToString()
    for n in range(200):
        call = channel.infer.future(body, timeout=TIMEOUT_S)
        if n % 2:
            threading.Event().wait(0.001)  # some are cancelled on the way, some in the queue
        call.cancel()
        assert call.cancelled()
    wait_until(lambda: server.metric("gpuserve_queue_size", model="patient") == 0, "nothing waits")


def test_cancels_in_the_middle_of_an_upload(channel: Channel) -> None:
    body, array = large(32 * MIB)
    for n in range(10):
        call = channel.infer.future(body, timeout=TIMEOUT_S)
        threading.Event().wait(0.004 * n)
        call.cancel()
    # The window of the connection is whole, although 320 MiB were begun.
    assert channel.infer(body, timeout=TIMEOUT_S).raw_output_contents[0] == array.tobytes()


def test_a_message_that_is_too_large_is_refused_while_it_is_sent(channel: Channel) -> None:
    body = message("echo_FP32", 1, 32 * MIB, raw=bytes(128 * MIB)).SerializeToString()
    for _ in range(2):
        error = channel.infer.future(body, timeout=TIMEOUT_S).exception()
        assert error.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert str(LIMIT_NBYTES) in error.details()


@pytest.mark.thorough
@pytest.mark.parametrize("every_ms", [10, 1000])
def test_keepalive_pings(server: OperatedServer, every_ms: int) -> None:
    options = {"keepalive_time_ms": every_ms, "keepalive_timeout_ms": 5000, "http2.max_pings_without_data": 0}
    options["keepalive_permit_without_calls"] = 1
    with Channel(server, **{f"grpc.{name}": value for name, value in options.items()}) as channel:
        end = time.monotonic() + 1.2
        waiting = channel.infer.future(message("patient").SerializeToString(), timeout=1.0)
        while time.monotonic() < end:
            channel.infer(message().SerializeToString(), timeout=TIMEOUT_S)
        assert waiting.exception().code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert not channel.was_lost


def test_the_status_of_a_long_error_text_reaches_its_client(server: OperatedServer) -> None:
    """It takes no headers of more than 8 KiB, and is told RESOURCE_EXHAUSTED by itself then."""
    with Channel(server) as made:
        with pytest.raises(grpc.RpcError) as raised:
            made.infer(message("complains").SerializeToString(), timeout=TIMEOUT_S)
        assert raised.value.code() == grpc.StatusCode.INTERNAL
        assert "größer als möglich: 大きすぎる 🙂 größer" in raised.value.details()
        assert "\N{REPLACEMENT CHARACTER}" not in raised.value.details()
        assert not made.was_lost
