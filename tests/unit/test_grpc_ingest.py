"""Large gRPC requests read while they arrive: the same as those read at once, and no block is lost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from expensive import field, varint
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from gpuserve.core.errors import InvalidArgument, RequestError, ResourceExhausted
from gpuserve.front.ipc.heap_memory import Intake, Share
from gpuserve.front.protocols.grpc.grpc_protocol import frame
from gpuserve.front.protocols.grpc.infer_decoder import parse_infer_request
from gpuserve.front.protocols.grpc.infer_encoder import LARGE_NBYTES
from gpuserve.front.protocols.grpc.request_scanner import MAX_FIELDS, GrpcBodyScanner
from gpuserve.front.requests.inference import Data, InferRequest
from gpuserve_worker.memory.arena import Arena, Block

LIMIT = 1 << 30


def share() -> Share:
    return Share(Intake(LIMIT, lambda: None))


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    made = Arena(1 << 28, lambda segment, fd, nbytes: None, lambda segment: None)
    made.free(made.allocate(1))  # its segment stays for the module: no test has left it behind
    yield made
    made.close()


def allocator(arena: Arena) -> Any:
    return lambda model_name, nbytes: arena.allocate(nbytes)


def body_of(*fields: bytes) -> bytes:
    message = b"".join(fields)
    return frame(len(message)) + message


def request_fields(raws: Sequence[bytes], name: str = "m") -> list[bytes]:
    """The top-level fields of a request with one UINT8 input for each raw, in the usual order."""
    inputs = [
        field(5, pb.ModelInferRequest.InferInputTensor(name=f"x{n}", datatype="UINT8").SerializeToString())
        for n in range(len(raws))
    ]
    return [field(1, name.encode()), *inputs, *(field(7, raw) for raw in raws)]


def scan(scanner: GrpcBodyScanner, body: bytes, cuts: Sequence[int] = ()) -> InferRequest:
    for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        scanner.feed(body[start:end])
    return scanner.finish()


def data_bytes(data: Data) -> bytes:
    return bytes(data.view if isinstance(data, Block) else data)


def plain(request: InferRequest) -> tuple[Any, ...]:
    inputs = [(t.name, t.datatype, t.shape, data_bytes(t.data)) for t in request.inputs]
    named = request.model_name, request.model_version, request.id
    return (*named, request.parameters, inputs, request.outputs, request.timeout_s)


def free_inputs(arena: Arena, request: InferRequest) -> int:
    blocks = [t.data for t in request.inputs if isinstance(t.data, Block)]
    for block in blocks:
        arena.free(block)
    return len(blocks)


names = st.text(max_size=12)
sizes = st.one_of(st.integers(0, 200), st.integers(LARGE_NBYTES - 1, LARGE_NBYTES + 3))
raws = st.builds(lambda nbytes, fill: bytes([fill]) * nbytes, sizes, st.integers(0, 255))
unknown_fields = st.sampled_from(
    [
        varint(90 << 3) + varint(2**64 - 1),
        varint(91 << 3 | 1) + bytes(8),
        varint(92 << 3 | 5) + bytes(4),
        field(93, b"not ours"),
        varint(7 << 3) + varint(5),  # field 7 as a number is not a tensor
        varint(94 << 3 | 3) + field(7, b"inside a group") + varint(94 << 3 | 4),
    ]
)


@st.composite
def tensors(draw: st.DrawFn) -> bytes:
    datatype = draw(st.sampled_from(["FP32", "BYTES", "?"]))
    tensor = pb.ModelInferRequest.InferInputTensor(name=draw(names), datatype=datatype)
    tensor.shape.extend(draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3)))
    if draw(st.integers(0, 5)) == 0:
        tensor.contents.fp32_contents.extend([1.5, 2.5])
    return tensor.SerializeToString()


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """A ModelInferRequest, right or wrong, with its top-level fields in any order."""
    fields = [field(5, one) for one in draw(st.lists(tensors(), max_size=3))]
    fields += [field(7, raw) for raw in draw(st.lists(raws, max_size=3))]
    fields += [field(6, field(1, name.encode())) for name in draw(st.lists(names, max_size=2))]
    fields += draw(st.lists(unknown_fields, max_size=3))
    fields.append(field(1, draw(st.sampled_from(["", "m", "modèle"])).encode()))
    fields.append(field(3, draw(names).encode()))
    if draw(st.booleans()):
        parameters = pb.ModelInferRequest()
        parameters.parameters["k"].int64_param = draw(st.integers(-5, 5))
        fields.append(parameters.SerializeToString())
    return b"".join(draw(st.permutations(fields)))


def outcome(read: Any) -> Any:
    try:
        return plain(read())
    except RequestError as error:
        return type(error), str(error)


@settings(suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large], deadline=None)
@given(message=messages(), data=st.data())
def test_any_cut_of_any_message_reads_the_same(arena: Arena, message: bytes, data: st.DataObject) -> None:
    body = frame(len(message)) + message
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)), max_size=10)))
    refuse = data.draw(st.booleans())
    scanner = GrpcBodyScanner(lambda _, nbytes: None if refuse else arena.allocate(nbytes), LIMIT, share())
    requests = []

    def read() -> InferRequest:
        requests.append(scan(scanner, body, cuts))
        return requests[0]

    assert outcome(read) == outcome(lambda: parse_infer_request(message))
    for request in requests:
        free_inputs(arena, request)
    for block in scanner.abort():
        arena.free(block)
    assert arena.statistics().blocks == 0


def test_every_byte_may_come_alone(arena: Arena) -> None:
    body = body_of(*request_fields([b"abc", b"", b"d" * 200]))
    scanner = GrpcBodyScanner(allocator(arena), LIMIT, share())
    request = scan(scanner, body, range(len(body)))
    assert [data_bytes(t.data) for t in request.inputs] == [b"abc", b"", b"d" * 200]


def test_large_tensors_go_to_blocks_and_small_ones_do_not(arena: Arena) -> None:
    large = bytes(range(256)) * (LARGE_NBYTES // 256)
    asked = []

    def allocate(model_name: str, nbytes: int) -> Block:
        asked.append((model_name, nbytes))
        return arena.allocate(nbytes)

    scanner = GrpcBodyScanner(allocate, LIMIT, share())
    body = body_of(*request_fields([large, b"small", large]))
    request = scan(scanner, body, [100, LARGE_NBYTES, LARGE_NBYTES + 1])
    assert asked == [("m", LARGE_NBYTES)] * 2
    assert [type(t.data) for t in request.inputs] == [Block, bytes, Block]
    assert [data_bytes(t.data) for t in request.inputs] == [large, b"small", large]
    assert scanner.blocks == []
    assert free_inputs(arena, request) == 2


def test_a_tensor_before_the_model_name_stays_on_the_heap(arena: Arena) -> None:
    large = bytes(LARGE_NBYTES)
    scanner = GrpcBodyScanner(allocator(arena), LIMIT, share())
    request = scan(scanner, body_of(*reversed(request_fields([large]))))
    assert isinstance(request.inputs[0].data, memoryview)
    assert data_bytes(request.inputs[0].data) == large


def test_tensors_stay_on_the_heap_when_there_is_no_block() -> None:
    scanner = GrpcBodyScanner(lambda model_name, nbytes: None, LIMIT, share())
    request = scan(scanner, body_of(*request_fields([bytes(LARGE_NBYTES)])))
    assert data_bytes(request.inputs[0].data) == bytes(LARGE_NBYTES)


def test_a_request_that_changes_its_model_after_a_block_was_given_is_refused(arena: Arena) -> None:
    fields = [*request_fields([bytes(LARGE_NBYTES), bytes(LARGE_NBYTES)]), field(1, b"other")]
    scanner = GrpcBodyScanner(allocator(arena), LIMIT, share())
    with pytest.raises(InvalidArgument, match="names more than one model"):
        scan(scanner, body_of(*fields))
    blocks = scanner.abort()
    assert len(blocks) == 2
    for block in blocks:
        arena.free(block)


def test_a_body_cut_anywhere_is_refused_and_gives_its_blocks_back(arena: Arena) -> None:
    body = body_of(*request_fields([b"abc", bytes(LARGE_NBYTES)]))
    for nbytes in [*range(60), LARGE_NBYTES, len(body) - 1]:
        scanner = GrpcBodyScanner(allocator(arena), LIMIT, share())
        scanner.feed(body[:nbytes])
        with pytest.raises(InvalidArgument, match=f"truncated: expected .* got {nbytes}$"):
            scanner.finish()
        for block in scanner.abort():
            arena.free(block)
    assert arena.statistics().blocks == 0


def test_abort_gives_each_block_back_once(arena: Arena) -> None:
    scanner = GrpcBodyScanner(allocator(arena), LIMIT, share())
    scanner.feed(body_of(*request_fields([bytes(LARGE_NBYTES)]))[:1000])
    blocks = scanner.abort()
    assert len(blocks) == 1
    assert scanner.abort() == []
    arena.free(blocks[0])


@pytest.mark.parametrize(
    ("body", "error", "sentence"),
    [
        (b"\2\0\0\0\0", InvalidArgument, "flag of 0 or 1, got 2"),
        (b"\1\0\0\0\1a", InvalidArgument, "names no grpc-encoding"),
        (frame(LIMIT + 1), ResourceExhausted, "is over the limit"),
        (body_of(field(1, b"m")) + b"\0", InvalidArgument, "goes on after its message"),
        (body_of(field(1, b"m")) * 2, InvalidArgument, "goes on after its message"),
        (frame(4) + b"\x3a\x0aab", InvalidArgument, "a field of 10 bytes begins 2 bytes before its end"),
        (frame(3) + b"\x0a\xff\xff", InvalidArgument, "begins 0 bytes before its end"),
        (frame(12) + b"\xff" * 12, InvalidArgument, "a number has over 64 bits"),
        (frame(2) + b"\x07\x00", InvalidArgument, "wire type 7"),
        (frame(1) + b"\x0c", InvalidArgument, "protobuf encoding is malformed"),
        (body_of(field(1, b"\xff")), InvalidArgument, "protobuf encoding is malformed"),
        (body_of(*[field(99, b"")] * (MAX_FIELDS + 1)), InvalidArgument, f"at most {MAX_FIELDS}"),
        (body_of(*[field(7, b"")] * 1025), InvalidArgument, "over 1024 entries in raw_input_contents"),
    ],
)
def test_a_wrong_body_is_refused(body: bytes, error: type[RequestError], sentence: str) -> None:
    scanner = GrpcBodyScanner(lambda model_name, nbytes: None, LIMIT, share())
    with pytest.raises(error, match=sentence):
        scan(scanner, body)


def test_a_length_that_lies_asks_for_no_memory() -> None:
    asked: list[int] = []

    def allocate(model_name: str, nbytes: int) -> None:
        asked.append(nbytes)

    scanner = GrpcBodyScanner(allocate, LIMIT, share())
    with pytest.raises(InvalidArgument, match="before its end"):
        scan(scanner, body_of(field(1, b"m"), b"\x3a" + varint(1 << 40)))
    assert asked == []
