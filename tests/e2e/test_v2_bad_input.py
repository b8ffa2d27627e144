"""Requests made to break something: bodies that contradict the model or lie, codings that grow, frames that
gRPC does not know, mutated messages. Each is refused by one sentence with the right code, none reaches a
worker, and the log has no word of it.
"""

from __future__ import annotations

import gzip
import http.client
import json
import re
import subprocess
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from config_file import models, write_config
from exploring import examples
from fuzzing import json_requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from operated import OperatedServer
from processes import wait_until
from sending import DATA, FOUR, INFER, TIMEOUT_S, Sender, asking, assert_clear, entry, frame, message, sized
from tritonclient.grpc import service_pb2

LIMIT_NBYTES = 1 << 20
TOO_DEEP = "nesting depth exceeds maximum allowed limit (100)"
LIVE = "/inference.GRPCInferenceService/ServerLive"
SERVED = {
    *(f"echo_{datatype}" for datatype in ("FP32", "BYTES", "BOOL", "INT8", "FP16")),
    *("flat_FP32", "cube", "optional", "parameters"),
}
BOMB = gzip.compress(bytes(32 << 20), mtime=0)
#: The same as one entry of raw_input_contents.
RAW_BOMB = gzip.compress(b"\x3a\x80\x80\x80\x10" + bytes(32 << 20), mtime=0)
FUZZ = settings(
    max_examples=examples(200),
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def sender(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sender]:
    """A server that takes up to 1 MiB, and its log."""
    folder = tmp_path_factory.mktemp("hostile")
    entries = models(*SERVED)
    limits = {"host": "127.0.0.1", "max_request_nbytes": LIMIT_NBYTES}
    config = write_config(folder, entries, **limits)
    with OperatedServer(config).until_ended() as started:
        made = Sender(started)
        made.assert_serves()  # which also opens the connections that all tests share
        yield made
        made.close()


@pytest.fixture(autouse=True)
def _the_server_goes_on(sender: Sender) -> Iterator[None]:
    said = len(sender.server.log)
    yield
    wait_until(lambda: sender.server.metric("gpuserve_arena_blocks") == 0, "the arena is empty", TIMEOUT_S)
    sender.assert_serves()
    assert sender.server.log[said:] == []


@pytest.fixture
def refused(sender: Sender) -> Iterator[None]:
    """Nothing that the test sends reaches a worker."""
    before = sender.batches()
    assert before > 0  # of the good requests so far
    yield
    assert sender.batches() == before


# ---- what contradicts the model, over HTTP --------------------------------------------------


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(
    ("entries", "raw", "model", "named"),
    [
        ([sized(name="w")], FOUR, "echo_FP32", ["'w'", "'x'"]),
        ([sized(datatype="INT32")], FOUR, "echo_FP32", ["'x'", "INT32", "FP32"]),
        ([sized(datatype="FLOAT")], FOUR, "echo_FP32", ["'x'", "FLOAT", "FP32"]),
        ([sized(shape=[4])], FOUR, "echo_FP32", ["'x'", "[-1,-1]", "[4]"]),
        ([sized(24, shape=[1, 1, 3, 2])], FOUR + FOUR[:8], "cube", ["'x'", "[-1,-1,2,3]", "[1,1,3,2]"]),
        ([sized(shape=[1, 5])], FOUR, "echo_FP32", ["'x'", "20", "16"]),
        ([sized(8, shape=[2])], FOUR[:8], "flat_FP32", ["'x'", "[]", "[2]"]),
        ([sized()], FOUR[:-1], "echo_FP32", ["'x'", "1 additional bytes"]),
        ([sized()], FOUR + b"z", "echo_FP32", ["additional input data"]),
        ([sized(15)], FOUR, "echo_FP32", ["additional input data"]),
        ([sized(-1)], FOUR, "echo_FP32", ["'x'", "binary_data_size"]),
        ([sized(1 << 62)], FOUR, "echo_FP32", ["'x'", "additional bytes"]),
        ([sized(1 << 63)], FOUR, "echo_FP32", ["'x'", "binary_data_size"]),
        ([sized(400_000, shape=[1, 100_000])], bytes(399_999), "echo_FP32", ["'x'", "1 additional bytes"]),
        ([], b"", "echo_FP32", ["'x'", "missing"]),
        ([sized(), sized()], FOUR * 2, "echo_FP32", ["'x'", "already exists"]),
        ([sized(), sized(name="z")], FOUR * 2, "echo_FP32", ["'z'", "'x'"]),
        ([sized(5, datatype="BYTES", shape=[1, 1])], b"\5\0\0\0a", "echo_BYTES", ["'x'", "5", "1 bytes"]),
        ([sized(2, datatype="BYTES", shape=[1, 1])], b"\5\0", "echo_BYTES", ["'x'", "4 bytes", "2 bytes"]),
        ([sized(5, datatype="BYTES", shape=[1, 2])], b"\1\0\0\0a", "echo_BYTES", ["'x'", "expected 2", "1"]),
        ([sized(4, datatype="BOOL")], b"\0\1\2\3", "echo_BOOL", ["'x'", "0 or 1", "3"]),
        ([sized(260, shape=[65, 1])], bytes(260), "echo_FP32", ["'x'", "64", "65"]),
    ],
)
def test_binary_inputs_that_do_not_fit(
    sender: Sender, entries: list[Any], raw: bytes, model: str, named: list[str]
) -> None:
    status, text = sender.binary(entries, raw, model)
    assert status == 400
    assert_clear(text, [f"'{model}'", *named])


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(
    ("document", "named"),
    [
        ({"inputs": [entry(data=DATA, name="wrong")]}, ["wrong"]),
        ({"inputs": [entry(data=DATA, datatype="INT32")]}, ["'x'", "INT32", "FP32"]),
        ({"inputs": [entry(data=DATA, shape=[4])]}, ["'x'"]),
        ({"inputs": [entry(data=DATA, shape=[1, 2, 2])]}, ["'x'", "[1,2,2]"]),
        ({"inputs": [entry(data=DATA, shape=[1.5, 4])]}, ["shape"]),
        ({"inputs": [entry(data=DATA, shape=[1, -4])]}, ["got -4 for input 'x'"]),
        ({"inputs": [entry(data=[True, 1, 2, 3])]}, ["'x'"]),
        ({"inputs": [entry(data=DATA)], "outputs": [{"name": "nope"}]}, ["nope"]),
        ({"inputs": [entry(data=DATA)], "id": 7}, ["id"]),
        ({"inputs": []}, ["x"]),
        ({}, ["inputs"]),
        ([], ["object"]),
        (b"\xff\xfe", ["JSON"]),
        (b'{"inputs": [], "inputs": []}', ["inputs"]),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", [TOO_DEEP]),
        (b"[" * 1_000_000, [TOO_DEEP]),
        ({"inputs": [entry(data=DATA)] * 2}, ["'x'", "already exists"]),
        ({"inputs": [entry(data=DATA), entry(name="z", data=DATA)]}, ["'z'", "'x'"]),
        ({"inputs": [entry(data=DATA)], "outputs": [{"name": "y"}] * 2}, ["'y'", "already exists"]),
        ({"inputs": [entry(data=[], shape=[65, 0])]}, ["'x'", "64", "65"]),
        ({"inputs": [entry(data=[], shape=[0, 4])]}, ["'x'", "at least 1", "got 0"]),
        ({"inputs": [entry(data=DATA, shape=[1, 1 << 63])]}, ["'x'", "shape", "9223372036854775808"]),
        ({"inputs": [entry(data=DATA, shape=[1 << 31, 1 << 33])]}, ["'x'", "9223372036854775807"]),
        ({"inputs": [entry(data=["a", 1, 2, 3])]}, ["'x'", "FP32", '"a"']),
        ({"inputs": [entry()]}, ["'x'", "no field is set"]),
        ({"inputs": [sized(data=DATA)]}, ["'x'", "only one"]),
        ({"inputs": [{"datatype": "FP32", "shape": [1, 4], "data": DATA}]}, ["name", "input 0"]),
        (b'{"inputs": [', ["JSON"]),
        (json.dumps({"inputs": [entry(data=DATA)]}).encode() + b"\0", ["JSON"]),
        (b'{"inputs":[{"name":"x","shape":[' + b"9" * 5000 + b"]}]}", ["too many digits"]),
    ],
)
def test_json_that_does_not_fit(sender: Sender, document: Any, named: list[str]) -> None:
    status, text = sender.json(document)
    assert status == 400
    assert_clear(text, ["'echo_FP32'", *named])


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(
    ("data", "wanted", "text"),
    [
        (DATA[:1], 4, "Failed to parse 'data' field: shape does not match true shape"),
        (DATA, 1 << 40, "Failed to parse 'data' field: shape does not match true shape"),
        ([*DATA, 4], 4, "Unable to parse 'data': Shape does not match true shape of 'data' field"),
    ],
)
def test_sentences_begin_as_tritons(sender: Sender, data: list[int], wanted: int, text: str) -> None:
    found = f"input 'x' has {len(data)} in 'data', its 'shape' makes {wanted}"
    assert sender.json({"inputs": [entry(data=data, shape=[1, wanted])]}) == (400, f"{text}: {found}")


@pytest.mark.usefixtures("refused")
def test_a_raw_request_for_a_model_with_two_inputs(sender: Sender) -> None:
    status, text = sender.json(b"abc", "optional", inference_header_content_length="0")
    assert status == 400
    assert_clear(text, ["1 input", "2 inputs", "'optional'"])


# ---- what contradicts the model, over gRPC --------------------------------------------------


def changed(made: Any, **fields: Any) -> Any:
    """The message with other fields of its input."""
    for key, value in fields.items():
        setattr(made.inputs[0], key, value)
    return made


def joined(*messages: Any, keep: int | None = None) -> Any:
    """A message with the inputs of all, and the first ``keep`` of their contents."""
    made = service_pb2.ModelInferRequest(model_name=messages[0].model_name)
    for one in messages:
        made.MergeFrom(one)
    del made.raw_input_contents[len(messages) if keep is None else keep :]
    return made


def typed(field: str, values: list[Any], made: Any, *, raw: bool = False) -> Any:
    if not raw:
        del made.raw_input_contents[:]
    getattr(made.inputs[0].contents, field).extend(values)
    return made


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(
    ("made", "named"),
    [
        (changed(message(), name="wrong"), ["wrong", "x"]),
        (message(datatype="INT32"), ["'x'", "INT32", "FP32"]),
        (message(datatype="FLOAT"), ["'x'", "FLOAT"]),
        (message("echo_FP32", 4), ["'x'"]),
        (message("echo_FP32", 1, 2, 2), ["'x'", "[-1,-1]", "[1,2,2]"]),
        (message("echo_FP32", 1, 5), ["'x'", "20", "16"]),
        (message("echo_FP32", 1, -4), ["'x'", "-4"]),
        (message("echo_FP32", 1, 1 << 62, 4), ["'x'"]),
        (message("echo_FP32", 1, 1 << 62), ["'x'"]),
        (message("echo_FP32", 65, 0), ["65", "64"]),
        (message(raw=FOUR[:-1]), ["'x'", "16", "15"]),
        (service_pb2.ModelInferRequest(model_name="echo_FP32"), ["x"]),
        (joined(message(), message()), ["'x'", "already exists"]),
        (joined(message(), changed(message(), name="z")), ["'z'"]),
        (typed("fp32_contents", [0.0] * 4, message(), raw=True), ["'x'", "contents"]),
        (asking(message(), "nope"), ["nope", "y"]),
        (
            joined(message(), service_pb2.ModelInferRequest(raw_input_contents=[FOUR])),
            ["raw_input_contents", "2", "1"],
        ),
        (joined(message(), keep=0), ["'x'"]),
        (message("echo_BYTES", 1, 1, datatype="BYTES", raw=b"\5\0\0\0abc"), ["'x'"]),
        (message("echo_BYTES", 1, 1, datatype="BYTES", raw=b"\1\0"), ["'x'"]),
        (message("echo_BYTES", 1, 1, datatype="BYTES", raw=b"\0\0\0\x80"), ["'x'"]),
        (message("echo_BYTES", 1, 1, datatype="BYTES", raw=b"\1\0\0\0a\1\0\0\0b"), ["'x'"]),
        (asking(message(), "y", "y"), ["'y'", "already exists"]),
        (message("echo_FP32", 1 << 31, 1 << 33), ["'x'", "64", "2147483648"]),
        (message("cube", 1, (1 << 63) - 1, 2, 3), ["'x'", "too large", "9223372036854775807"]),
        (message("echo_FP32", 1, -(1 << 63)), ["'x'", "at least 0", "-9223372036854775808"]),
        (message("echo_BOOL", datatype="BOOL", raw=b"\0\1\2\3"), ["'x'", "0 or 1", "3"]),
        (message("optional"), ["'x'", "['a','b']"]),
        (typed("fp32_contents", [1.0], message()), ["'x'", "16", "4"]),
        (typed("int_contents", [1] * 4, message()), ["'x'", "INT32", "FP32"]),
        (typed("int_contents", [300] * 4, message("echo_INT8", datatype="INT8")), ["'x'", "300", "127"]),
        (typed("fp32_contents", [1.0] * 4, message("echo_FP16", datatype="FP16")), ["'x'", "FP32", "FP16"]),
        (typed("bytes_contents", [b"a"], message("echo_BYTES", datatype="BYTES")), ["'x'", "4", "1"]),
    ],
)
def test_messages_that_do_not_fit(sender: Sender, made: Any, named: list[str]) -> None:
    code, text = sender.grpc(made.SerializeToString())
    assert code == "INVALID_ARGUMENT"
    assert_clear(text, [f"'{made.model_name}'", *named])


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("field", ["name", "datatype"])
def test_names_of_64_kib(sender: Sender, field: str) -> None:
    made = message()
    setattr(made.inputs[0], field, "n" * 65536)
    code, text = sender.grpc(made.SerializeToString())
    assert code == "INVALID_ARGUMENT"
    assert_clear(text, ["'echo_FP32'", "nnn…"])


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("name", ["../x", "..%2fx", "a\0b", "", "x" * 65536, "\N{FRACTION SLASH}etc"])
def test_odd_model_names(sender: Sender, name: str) -> None:
    code, text = sender.grpc(message(name).SerializeToString())
    assert (code, text.startswith("Request for unknown model")) == ("NOT_FOUND", True)
    assert len(text) < 300


# ---- request lines --------------------------------------------------------------------------


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(
    ("method", "path", "status", "text"),
    [
        ("GET", "/v3", 404, "Not Found"),
        ("GET", "/v2/models/echo_FP32/infer", 405, "Method Not Allowed"),
        ("HEAD", "/v2", 405, ""),
        ("HEAD", "/v2/models/echo_FP32/infer", 405, ""),
        ("OPTIONS", "/v2/models/echo_FP32/infer", 405, "Method Not Allowed"),
        ("DELETE", "/v2/models/echo_FP32", 405, "Method Not Allowed"),
        ("BREW", "/v2", 405, "Method Not Allowed"),
        ("POST", "/v2/models/../x/infer", 404, "Not Found"),
        ("POST", "/v2/models/..%252fx/infer", 404, "Request for unknown model: '..%2fx' is not found"),
        (
            "GET",
            "/v2/models/echo%255FFP32",
            404,
            "Request for unknown model: 'echo%5FFP32' is not found; did you mean 'echo_FP32'?",
        ),
        ("POST", "/v2/models//infer", 404, "Not Found"),
        ("POST", "/v2/models/echo_FP32/versions/x/infer", 404, "Not Found"),
        ("POST", "/v2/models/echo_FP32/versions/-1/infer", 404, "Not Found"),
        ("POST", "/v2/models/echo_FP32/versions/" + "9" * 5000 + "/infer", 404, "Not Found"),
        (
            "POST",
            "/v2/models/echo_FP32/versions/2/infer",
            404,
            "Request for unknown model: 'echo_FP32' version 2 is not found, only version 1 is",
        ),
    ],
)
def test_request_lines_that_lead_nowhere(
    sender: Sender, method: str, path: str, status: int, text: str
) -> None:
    assert sender.http(path, method=method) == (status, text)


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("path", ["%2e%2e%2fetc", "a%00b", "x" * 10_000, "%ff"])
def test_odd_model_names_in_paths(sender: Sender, path: str) -> None:
    status, text = sender.http(f"/v2/models/{path}/infer", b"{}")
    assert (status, "unknown model" in text) == (404, True)


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("headers", [{}, {"Transfer_Encoding": "chunked"}])
def test_an_empty_body_is_no_tensor(sender: Sender, headers: dict[str, str]) -> None:
    status, text = sender.json(b"0\r\n\r\n" if headers else b"", **headers)
    assert (status, "is empty, expected a JSON object such as" in text) == (400, True)


# ---- codings and limits ---------------------------------------------------------------------


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(
    ("body", "coding", "status", "named"),
    [
        (BOMB, "gzip", 413, [str(LIMIT_NBYTES), "after decompression"]),
        (gzip.compress(b"{}" * 1000, mtime=0)[:-4], "gzip", 400, ["gzip", "truncated"]),
        (gzip.compress(b"{}", mtime=0) + b"x", "gzip", 400, ["gzip", "goes on"]),
        (gzip.compress(b"{}", mtime=0) * 2, "gzip", 400, ["gzip", "goes on"]),
        (b"{}", "deflate", 400, ["deflate"]),
        (b"no", "gzip", 400, ["gzip"]),
        (b"{}", "br", 501, ["Unsupported compression type"]),
        (b"{}", "gzip, gzip", 501, ["Unsupported compression type"]),
        (bytes(LIMIT_NBYTES + 1), "identity", 413, [str(LIMIT_NBYTES + 1), str(LIMIT_NBYTES)]),
    ],
)
def test_codings_that_lie_or_grow(
    sender: Sender, body: bytes, coding: str, status: int, named: list[str]
) -> None:
    answered, text = sender.json(body, content_encoding=coding)
    assert answered == status
    assert_clear(text, named)


@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize(("nbytes", "status"), [(1, 400), (5 << 20, 400)])
def test_a_repository_index_of_nonsense(sender: Sender, nbytes: int, status: int) -> None:
    answered, text = sender.http("/v2/repository/index", b"[" * nbytes)
    assert answered == status
    assert_clear(text, ["request"])


@pytest.mark.thorough
@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("compression", [grpc.Compression.NoCompression, grpc.Compression.Gzip])
@pytest.mark.parametrize("nbytes", [LIMIT_NBYTES, 32 << 20])
def test_messages_over_the_limit(sender: Sender, compression: Any, nbytes: int) -> None:
    body = message("echo_FP32", 1, nbytes // 4, raw=bytes(nbytes)).SerializeToString()
    code, text = sender.grpc(body, compression=compression)
    assert code == "RESOURCE_EXHAUSTED"
    assert text


# ---- frames ---------------------------------------------------------------------------------


def by_curl(sender: Sender, body: bytes, path: str, *headers: str) -> tuple[int, str]:
    """(grpc-status, grpc-message) of a body that no client would send; -1 where there is no status."""
    given = ["te: trailers", "content-type: application/grpc", *headers]
    options = [option for header in given for option in ("-H", header)]
    command = ["curl", "-s", "-i", "-m", str(TIMEOUT_S), "--http2-prior-knowledge", "--data-binary", "@-"]
    url = f"http://{sender.server.addresses['gRPC']}{path}"
    done = subprocess.run([*command, *options, url], input=body, capture_output=True, check=False)
    found = dict(re.findall(r"^(grpc-status|grpc-message): ([^\r]*)", done.stdout.decode("latin-1"), re.M))
    return int(found.get("grpc-status", -1)), found.get("grpc-message", "")


GOOD = message().SerializeToString()


@pytest.mark.thorough
@pytest.mark.usefixtures("refused")
@pytest.mark.parametrize("path", [INFER, LIVE, "/grpc.health.v1.Health/Check"])
@pytest.mark.parametrize(
    ("body", "headers", "status", "named"),
    [
        (b"", (), 3, ["expected 5", "got 0"]),
        (frame(GOOD)[:3], (), 3, ["expected 5", "got 3"]),
        (frame(GOOD)[:-1], (), 3, [f"expected {len(GOOD) + 5}", f"got {len(GOOD) + 4}"]),
        (frame(GOOD) * 2, (), 3, ["exactly one"]),
        (frame(GOOD, 7), (), 3, ["0 or 1", "got 7"]),
        (frame(GOOD, 1), (), 3, ["compressed", "no grpc-encoding"]),
        (frame(GOOD, 1), ("grpc-encoding: gzip",), 3, ["not gzip data"]),
        (frame(GOOD, 1), ("grpc-encoding: snappy",), 12, ["'snappy'", "gzip"]),
        (b"\0\xff\xff\xff\xff" + GOOD, (), 8, ["4294967295", str(LIMIT_NBYTES)]),
        (frame(RAW_BOMB, 1), ("grpc-encoding: gzip",), 8, [str(LIMIT_NBYTES)]),
    ],
)
def test_frames_that_lie(
    sender: Sender, path: str, body: bytes, headers: tuple[str, ...], status: int, named: list[str]
) -> None:
    answered, text = by_curl(sender, body, path, *headers)
    assert answered == status
    assert_clear(text, named)


# ---- clients that leave ---------------------------------------------------------------------


@pytest.mark.usefixtures("refused")
def test_a_client_that_leaves_a_chunked_body_without_end(sender: Sender) -> None:
    head = json.dumps({"inputs": [sized(800_000, shape=[1, 200_000])]}).encode()
    piece = head + bytes(400_000)
    for _ in range(3):
        connection = http.client.HTTPConnection(sender.server.addresses["HTTP"], timeout=TIMEOUT_S)
        connection.putrequest("POST", "/v2/models/echo_FP32/infer")
        connection.putheader("Transfer-Encoding", "chunked")
        connection.putheader("Inference-Header-Content-Length", str(len(head)))
        connection.endheaders(b"%x\r\n%b\r\n" % (len(piece), piece))
        wait_until(lambda: sender.server.metric("gpuserve_arena_blocks") == 1, "it arrives", TIMEOUT_S)
        connection.close()
        wait_until(lambda: sender.server.metric("gpuserve_arena_blocks") == 0, "it is gone", TIMEOUT_S)


# ---- noise ----------------------------------------------------------------------------------

#: Every endpoint of HTTP that reads a body.
READERS = (
    *(
        f"/v2/models/{name}/{verb}"
        for name in ("echo_FP32", "echo_BYTES", "parameters")
        for verb in ("infer", "generate", "generate_stream")
    ),
    *("/v2/repository/index", "/v2/repository/models/echo_FP32/load", "/v2/repository/models/x/unload"),
    *("/v2/trace/setting", "/v2/models/echo_FP32/trace/setting", "/v2/logging"),
    *("/v2/systemsharedmemory/region/a/register", "/v2/cudasharedmemory/region/a/register"),
    *("/v1/chat/completions", "/v1/completions", "/v1/embeddings"),
)


@pytest.fixture
def valid_requests(sender: Sender) -> Iterator[list[str]]:
    """Check that only the requests that the test lists reached a worker."""
    before, valid = sender.batches(), list[str]()
    yield valid
    assert sender.batches() - before in range(len(valid) + 1)


@given(path=st.sampled_from(READERS), raw=json_requests.INPUTS, length=st.none() | st.integers(-1, 100))
@settings(
    max_examples=examples(900), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_no_body_is_the_servers_fault(
    sender: Sender, valid_requests: list[str], path: str, raw: bytes, length: int | None
) -> None:
    named = {} if length is None else {"Inference_Header_Content_Length": str(length)}
    status, text = sender.http(path, raw, **named)
    assert status != 500, text
    if status == 200:
        valid_requests.append(path)


Edits = list[tuple[int, int]]
edits = st.lists(st.tuples(st.integers(0, 1 << 16), st.integers(0, 255)), min_size=1, max_size=4)
HEAD = json.dumps({"inputs": [sized()], "outputs": [{"name": "y"}]}).encode()


def mutated(body: bytes, changes: Edits, cut: int) -> bytes:
    """The bytes with some of them changed, and the last few left out."""
    made = bytearray(body)
    for where, byte in changes:
        made[where % len(made)] = byte
    return bytes(made[: len(made) - cut])


def assert_answered(status: int, text: str) -> None:
    """A refusal in words, or a mutation that is still a good request."""
    assert status in {200, 400, 404, 413, 501} or "as unsigned-integer" in text, (status, text)
    if status != 200:
        assert text
        assert_clear(text, [])


@pytest.mark.thorough
@FUZZ
@given(raw=st.binary(min_size=1, max_size=400))
def test_random_bodies(sender: Sender, raw: bytes) -> None:
    assert sender.grpc(raw)[0] in {"INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED"}
    assert_answered(*sender.json(raw))


@pytest.mark.thorough
@FUZZ
@given(changes=edits, cut=st.integers(0, 3))
def test_mutated_messages(sender: Sender, changes: Edits, cut: int) -> None:
    body = asking(message(), "y").SerializeToString()
    code, text = sender.grpc(mutated(body, changes, cut))
    assert code in {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED"}
    assert_clear(text, [])


@pytest.mark.thorough
@FUZZ
@given(changes=edits, cut=st.integers(0, 3))
def test_mutated_json(sender: Sender, changes: Edits, cut: int) -> None:
    body = json.dumps({"id": "a", "inputs": [entry(data=DATA)], "outputs": [{"name": "y"}]}).encode()
    assert_answered(*sender.json(mutated(body, changes, cut)))


@pytest.mark.thorough
@FUZZ
@given(changes=edits, cut=st.integers(0, 3), lie=st.integers(-4, 20))
def test_mutated_binary_requests(sender: Sender, changes: Edits, cut: int, lie: int) -> None:
    length = str(len(HEAD) + lie)
    body = mutated(HEAD + FOUR, changes, cut)
    assert_answered(*sender.json(body, inference_header_content_length=length))


@pytest.mark.thorough
@FUZZ
@given(length=st.one_of(st.integers().map(str), st.text("0123456789+-_.eEx ", max_size=40)))
def test_header_lengths(sender: Sender, length: str) -> None:
    assert_answered(*sender.json(HEAD + FOUR, inference_header_content_length=length))
