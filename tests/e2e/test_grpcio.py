"""``transport: grpcio`` as the second opinion: a server of each transport is sent the same bytes, and must
answer the same, to the byte. What only one of them does is in the tests of our own server.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import numpy as np
import pytest
from config_file import model, models, tensor, write_config
from grpc_reflection.v1alpha import reflection_pb2
from ingress import flags_of
from operated import OperatedServer
from processes import wait_until
from sending import message
from serving import GPUSERVE, Addresses, serving
from tls import Authority
from tritonclient.grpc import model_config_pb2, service_pb2

TIMEOUT_S = 15.0
LIMIT_NBYTES = 1 << 20
TOKEN = "correct-horse"
SERVICE = "/inference.GRPCInferenceService/"
HEALTH = "/grpc.health.v1.Health/"
INFER, STREAM = SERVICE + "ModelInfer", SERVICE + "ModelStreamInfer"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
STREAMS = Path(__file__).resolve().parents[1] / "models" / "streams.py"
STREAMED = ("count", "count_async", "fails_half_way", "plain", "each_to_its_own")
SERVED = ("echo_FP32", "echo_BYTES", "flat_FP32", "optional", "parameters", "cube")


class Answer(NamedTuple):
    """All that a client sees of a call."""

    code: str
    details: str
    messages: tuple[bytes, ...]


class Pair(NamedTuple):
    """One channel to a server of each transport."""

    native: Any
    grpcio: Any

    def assert_same(self, method: str, *requests: bytes, code: str = "OK", **options: Any) -> Answer:
        """Both answer alike, with this code."""
        ours, theirs = (ask(channel, method, *requests, **options) for channel in self)
        assert ours == theirs
        assert ours.code == code, ours
        return ours


def ask(channel: Any, method: str, *requests: bytes, **options: Any) -> Answer:
    """Send the requests on one call, close it, and take everything that comes."""
    call = channel.stream_stream(method)(iter(requests), timeout=TIMEOUT_S, **options)
    answers: list[bytes] = []
    try:
        answers.extend(call)
    except grpc.RpcError as error:
        return Answer(error.code().name, error.details(), tuple(answers))
    return Answer(call.code().name, call.details(), tuple(answers))


def streamed(name: str) -> dict[str, Any]:
    x, y = [tensor("x", "INT32", -1)], [tensor("y", "INT32", -1)]
    return model(name, name, x, y, 4, callable=f"{STREAMS}:{name}", decoupled=True)


@contextlib.contextmanager
def both(folder: Path, **settings: Any) -> Iterator[tuple[Addresses, Addresses]]:
    """A server of each transport with the same models and settings."""
    entries = [*(one for one in models() if one["name"] in SERVED), *map(streamed, STREAMED)]
    with contextlib.ExitStack() as stack:
        started = []
        for transport in ("native", "grpcio"):
            place = folder / transport
            place.mkdir()
            config = write_config(place, entries, host="127.0.0.1", transport=transport, **settings)
            command = GPUSERVE, "serve", str(config), *flags_of(transport)
            started.append(stack.enter_context(serving(*command)))
        yield started[0], started[1]


@contextlib.contextmanager
def channels(addresses: tuple[Addresses, Addresses], **options: Any) -> Iterator[Pair]:
    with (
        grpc.insecure_channel(addresses[0].grpc, **options) as native,
        grpc.insecure_channel(addresses[1].grpc, **options) as grpcio,
    ):
        yield Pair(native, grpcio)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    settings = {"max_request_nbytes": LIMIT_NBYTES, "grpc_header_forward_pattern": "^x-"}
    with both(tmp_path_factory.mktemp("plain"), **settings) as addresses, channels(addresses) as made:
        made.assert_same(SERVICE + "ServerLive", b"")  # opens the connections that all tests share
        yield made


def infer(name: str = "echo_FP32", nbytes: int = 16, **fields: Any) -> bytes:
    asked = message(name, 1, nbytes // 4, raw=bytes(range(256)) * (nbytes // 256) or bytes(nbytes))
    asked.MergeFrom(service_pb2.ModelInferRequest(**fields))
    return bytes(asked.SerializeToString())


def counted(name: str, count: int, request_id: str = "") -> bytes:
    asked = service_pb2.ModelInferRequest(model_name=name, id=request_id)
    asked.inputs.add(name="x", datatype="INT32", shape=[1, 1])
    asked.raw_input_contents.append(np.int32(count).tobytes())
    return bytes(asked.SerializeToString())


# ---- unary calls --------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [16, 4096, 65536, 524288])
def test_inference_of_every_size(pair: Pair, nbytes: int) -> None:
    (answer,) = pair.assert_same(INFER, infer(nbytes=nbytes, id="a")).messages
    assert len(service_pb2.ModelInferResponse.FromString(answer).raw_output_contents[0]) == nbytes


def typed(**contents: Any) -> bytes:
    asked = service_pb2.ModelInferRequest(model_name="echo_FP32")
    asked.inputs.add(name="x", datatype="FP32", shape=[1, 2], contents=contents)
    return bytes(asked.SerializeToString())


def parameters() -> bytes:
    asked = service_pb2.ModelInferRequest(model_name="parameters")
    asked.inputs.add(name="x", datatype="FP32", shape=[1, 1])
    asked.raw_input_contents.append(bytes(4))
    asked.parameters["mine"].string_param = "a"
    asked.parameters["priority"].uint64_param = 1
    return bytes(asked.SerializeToString())


def classes() -> bytes:
    asked = service_pb2.ModelInferRequest.FromString(infer())
    asked.outputs.add(name="y").parameters["classification"].int64_param = 2
    return bytes(asked.SerializeToString())


#: Without names of their own these tests would have the bytes of maps as names, in any order.
_NAMES = (
    "typed", "of another type", "parameters", "classes", "empty", "nonsense", "unknown", "version",
    "no version", "no input", "no shape", "decoupled",
)  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "code"),
    [
        (typed(fp32_contents=[1.0, 2.0]), "OK"),
        (typed(int_contents=[1, 2]), "INVALID_ARGUMENT"),
        (parameters(), "OK"),
        (classes(), "OK"),
        (b"", "NOT_FOUND"),
        (b"\xff\xff nonsense", "INVALID_ARGUMENT"),
        (infer("nope"), "NOT_FOUND"),
        (infer(model_version="7"), "NOT_FOUND"),
        (infer(model_version="first"), "INVALID_ARGUMENT"),
        (infer("optional"), "INVALID_ARGUMENT"),
        (infer("cube"), "INVALID_ARGUMENT"),
        (counted("count", 1), "UNIMPLEMENTED"),
    ],
    ids=_NAMES,
)
def test_what_is_right_and_what_is_wrong_in_a_request(pair: Pair, request_: bytes, code: str) -> None:
    pair.assert_same(INFER, request_, code=code)


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_compressed_requests(pair: Pair, compression: grpc.Compression) -> None:
    pair.assert_same(INFER, infer(nbytes=4096), compression=compression)


def test_a_message_over_the_limit_is_refused_by_both(pair: Pair) -> None:
    for channel in pair:  # whose words differ: grpc refuses it before anything of ours sees it
        assert ask(channel, INFER, infer(nbytes=2 * LIMIT_NBYTES)).code == "RESOURCE_EXHAUSTED"


def test_headers_are_forwarded(pair: Pair) -> None:
    seen = pair.assert_same(INFER, parameters(), metadata=[("x-mine", "b"), ("other", "c")])
    assert b"x-mine" in seen.messages[0]
    assert b"other" not in seen.messages[0]


NAMED = service_pb2.ModelMetadataRequest(name="echo_FP32").SerializeToString()
MISSING = service_pb2.ModelMetadataRequest(name="nope").SerializeToString()


@pytest.mark.parametrize(
    ("method", "request_", "code"),
    [
        ("ServerLive", b"", "OK"),
        ("ServerReady", b"", "OK"),
        ("ServerMetadata", b"", "OK"),
        ("ModelReady", NAMED, "OK"),
        ("ModelReady", MISSING, "OK"),
        ("ModelMetadata", NAMED, "OK"),
        ("ModelMetadata", MISSING, "NOT_FOUND"),
        ("ModelConfig", NAMED, "OK"),
        ("ModelConfig", MISSING, "NOT_FOUND"),
        ("ModelStatistics", MISSING, "INVALID_ARGUMENT"),
        ("RepositoryIndex", b"", "OK"),
        ("RepositoryModelLoad", b"\x12\x04nope", "UNAVAILABLE"),
        ("SystemSharedMemoryStatus", b"", "OK"),
        ("SystemSharedMemoryUnregister", b"", "OK"),
        ("ModelMetadata", b"\xff", "INVALID_ARGUMENT"),
    ],
)
def test_the_small_calls(pair: Pair, method: str, request_: bytes, code: str) -> None:
    pair.assert_same(SERVICE + method, request_, code=code)


@pytest.mark.parametrize(
    ("method", "kind"),
    [("TraceSetting", service_pb2.TraceSettingResponse), ("LogSettings", service_pb2.LogSettingsResponse)],
)
def test_settings_are_the_same_in_whatever_order(pair: Pair, method: str, kind: Any) -> None:
    ours, theirs = (kind.FromString(ask(channel, SERVICE + method, b"").messages[0]) for channel in pair)
    assert ours == theirs


def test_a_method_that_nobody_has(pair: Pair) -> None:
    for channel in pair:  # grpc has its own words for it
        assert ask(channel, SERVICE + "Nope", b"").code == "UNIMPLEMENTED"


def test_the_statistics_count_the_same(pair: Pair) -> None:
    """All but the durations."""
    counts = []
    for channel in pair:
        ask(channel, INFER, infer("flat_FP32"))
        (answer,) = ask(channel, SERVICE + "ModelStatistics", b"\x0a\x09flat_FP32").messages
        (one,) = service_pb2.ModelStatisticsResponse.FromString(answer).model_stats
        counts.append((one.inference_count, one.execution_count, one.inference_stats.success.count))
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("service", "code"), [("", "OK"), ("readiness", "OK"), ("nope", "NOT_FOUND")])
def test_health(pair: Pair, service: str, code: str) -> None:
    asked = b"\x0a" + bytes([len(service)]) + service.encode() if service else b""
    pair.assert_same(HEALTH + "Check", asked, code=code)


def test_a_watch_of_health_tells_at_once(pair: Pair) -> None:
    watches = [channel.unary_stream(HEALTH + "Watch")(b"", timeout=TIMEOUT_S) for channel in pair]
    assert next(watches[0]) == next(watches[1])
    for watch in watches:
        watch.cancel()


@pytest.mark.parametrize(
    "asked",
    [
        reflection_pb2.ServerReflectionRequest(list_services=""),
        reflection_pb2.ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService"),
        reflection_pb2.ServerReflectionRequest(file_by_filename="nope.proto"),
    ],
)
def test_reflection(pair: Pair, asked: Any) -> None:
    pair.assert_same(REFLECTION, asked.SerializeToString())


# ---- streams ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STREAMED)
@pytest.mark.parametrize("count", [0, 1, 5])
def test_a_stream_of_each_kind_of_model(pair: Pair, name: str, count: int) -> None:
    pair.assert_same(STREAM, counted(name, count, "a"))


def test_requests_of_a_stream_that_are_wrong_do_not_end_it(pair: Pair) -> None:
    answer = pair.assert_same(STREAM, counted("nope", 1), counted("plain", 1, "b"))
    assert len(answer.messages) == 2


def test_strict_errors_end_a_stream(pair: Pair) -> None:
    strict = [("triton_grpc_error", "true")]
    pair.assert_same(STREAM, counted("nope", 1, "a"), code="NOT_FOUND", metadata=strict)


def test_nonsense_in_a_stream(pair: Pair) -> None:
    pair.assert_same(STREAM, b"\xff\xff", code="OK")


def test_a_stream_without_requests(pair: Pair) -> None:
    assert pair.assert_same(STREAM).messages == ()


# ---- access, compression, TLS -------------------------------------------------------------------


@pytest.mark.thorough
def test_access_rules(tmp_path: Path) -> None:
    rules = [{"groups": ["inference", "metadata"], "token": TOKEN}]
    token = [("triton-grpc-protocol-triton-access-token", TOKEN)]
    wrong = [("triton-grpc-protocol-triton-access-token", "wrong")]
    with both(tmp_path, access_rules=rules) as addresses, channels(addresses) as pair:
        for method, asked in (
            (INFER, infer()),
            (STREAM, counted("plain", 1)),
            (SERVICE + "ServerMetadata", b""),
        ):
            pair.assert_same(method, asked, code="UNAVAILABLE")
            pair.assert_same(method, asked, code="UNAVAILABLE", metadata=wrong)
            pair.assert_same(method, asked, metadata=token)
        pair.assert_same(SERVICE + "ServerLive", b"")


@pytest.mark.thorough
def test_compressed_answers(tmp_path: Path) -> None:
    with both(tmp_path, grpc_response_compression="low") as addresses, channels(addresses) as pair:
        pair.assert_same(INFER, infer(nbytes=65536))


@pytest.mark.thorough
def test_tls_with_a_certificate_of_the_client(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    server, client = authority.issue("server"), authority.issue("client")
    settings = {
        "tls_certfile": str(server.certificate),
        "tls_keyfile": str(server.key),
        "tls_client_ca": str(authority.certificate),
        "tls_ports": ["grpc"],
    }
    trusted = authority.certificate.read_bytes()
    known = grpc.ssl_channel_credentials(trusted, client.key.read_bytes(), client.certificate.read_bytes())
    unknown = grpc.ssl_channel_credentials(trusted)
    with both(tmp_path, **settings) as addresses:
        for at in addresses:
            where = f"localhost:{at.grpc.rpartition(':')[2]}"
            with grpc.secure_channel(where, known) as channel:
                assert ask(channel, INFER, infer()).code == "OK"
            with grpc.secure_channel(where, unknown) as channel:
                assert ask(channel, INFER, infer()).code == "UNAVAILABLE"


# ---- the end ------------------------------------------------------------------------------------


def ended(folder: Path, transport: str) -> tuple[Any, ...]:
    """What a server with an open stream and a watch of its health says when it is told to end."""
    folder.mkdir()
    config = write_config(folder, [streamed("plain")], host="127.0.0.1", transport=transport, lame_duck_s=0.2)
    with OperatedServer(config, *flags_of(transport)) as started:
        server = started.wait_ready()
        with grpc.insecure_channel(server.addresses["gRPC"]) as channel:
            requests: list[bytes] = [counted("plain", 1)]
            silence = iter(lambda: requests.pop() if requests else _until(server), None)
            stream = channel.stream_stream(STREAM)(silence, timeout=TIMEOUT_S)
            first = next(stream)
            watch = channel.unary_stream(HEALTH + "Watch")(b"\x0a\x09readiness", timeout=TIMEOUT_S)
            states = [next(watch)]
            server.process.send_signal(signal.SIGTERM)
            states.append(next(watch))
            with pytest.raises(grpc.RpcError) as raised:
                next(stream)
            code = raised.value.code().name
        assert server.process.wait(TIMEOUT_S) == 0
        errors = [one for one in server.messages() if one["level"] in {"error", "critical"}]
    return first, states, code, errors


def _until(server: OperatedServer) -> None:
    """Ends a stream's requests with the server."""
    wait_until(lambda: server.process.poll() is not None, "the server ends", TIMEOUT_S)


@pytest.mark.thorough
def test_the_end_is_told_on_open_calls(tmp_path: Path) -> None:
    ours, theirs = (ended(tmp_path / transport, transport) for transport in ("native", "grpcio"))
    assert ours == theirs
    assert ours[2:] == ("UNAVAILABLE", [])


def test_the_model_configuration_is_readable(pair: Pair) -> None:
    (answer,) = pair.assert_same(SERVICE + "ModelConfig", NAMED).messages
    config = service_pb2.ModelConfigResponse.FromString(answer).config
    assert isinstance(config, model_config_pb2.ModelConfig)
    assert config.max_batch_size == 64
