"""The body scanner: however a body is cut into chunks, it makes what the parser makes of the whole."""

from __future__ import annotations

import itertools
import json
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from exploring import examples
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpuserve.core.errors import InvalidArgument, RequestError, ResourceExhausted
from gpuserve.front.ipc.heap_memory import Intake, Share
from gpuserve.front.protocols.http.body_scanner import BodyHead, HttpBodyScanner
from gpuserve.front.protocols.http.infer_codec import LARGE_NBYTES, parse_infer_request
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve_worker.memory.arena import Block
from gpuserve_worker.protocol.tensor import TensorSpec

LIMIT_NBYTES = 1 << 24
RAW_MODEL = ModelSpec("m", (TensorSpec("x", "BYTES", (1,)),), (), 0, (InstanceSpec("m_0", "cpu", {}),))


def share() -> Share:
    return Share(Intake(LIMIT_NBYTES, lambda: None))


class Blocks:
    """Gives blocks of heap memory out, and remembers them."""

    def __init__(self) -> None:
        self.given: list[Block] = []

    def allocate(self, nbytes: int) -> Block:
        block = Block(0, len(self.given), nbytes, memoryview(bytearray(nbytes)))
        self.given.append(block)
        return block


def no_block(_nbytes: int) -> None:
    return None


def scanner_of(*head: Any, allocate: Any = no_block) -> HttpBodyScanner:
    return HttpBodyScanner(BodyHead(*head), allocate, LIMIT_NBYTES, share())


def body_of(sizes: list[int], surplus: int = 0) -> tuple[bytes, str]:
    inputs: list[dict[str, Any]] = [{"name": "j", "datatype": "BOOL", "shape": [1], "data": [True]}]
    inputs += [
        {"name": f"x{i}", "datatype": "UINT8", "shape": [n], "parameters": {"binary_data_size": n}}
        for i, n in enumerate(sizes)
    ]
    text = json.dumps({"inputs": inputs, "id": "r"}).encode()
    tensors = bytes(itertools.islice(itertools.cycle(range(251)), sum(sizes) + surplus))
    return text + tensors, str(len(text))


def chunks_of(body: bytes, cuts: list[int]) -> Iterator[bytes]:
    edges = [0, *sorted(min(cut, len(body)) for cut in cuts), len(body)]
    for start, end in itertools.pairwise(edges):
        yield body[start:end]


def outcome(run: Any) -> Any:
    """A request as plain data, or the error, so that two ways to it can be compared."""
    try:
        request, form = run()
    except RequestError as error:
        return type(error), str(error)
    inputs = [(x.name, x.datatype, x.shape, bytes(getattr(x.data, "view", x.data))) for x in request.inputs]
    return request.id, request.outputs, request.parameters, inputs, form


def scan(scanner: HttpBodyScanner, chunks: Iterator[bytes]) -> Any:
    for chunk in chunks:
        scanner.feed(chunk)
    return scanner.finish()


SIZES = st.lists(
    st.sampled_from([0, 1, 7, 300, LARGE_NBYTES - 1, LARGE_NBYTES, LARGE_NBYTES + 9]), max_size=4
)


@settings(max_examples=examples(200), deadline=None)
@given(
    sizes=SIZES,
    cuts=st.lists(st.integers(0, 3 * LARGE_NBYTES), max_size=12),
    lost=st.sampled_from([0, 0, 0, 1, 250, LARGE_NBYTES]),
    surplus=st.sampled_from([0, 0, 0, 1, 70_000]),
    length_known=st.booleans(),
    header=st.sampled_from(["right", "right", "right", "none", "0", "-1", "x", "99999999999", "40000000"]),
    in_blocks=st.booleans(),
)
@example([], [], 0, 0, False, "0", True)
@example([0, 0], [], 0, 0, True, "right", True)
def test_any_chunking_makes_what_the_parser_makes(
    sizes: list[int],
    cuts: list[int],
    lost: int,
    surplus: int,
    length_known: bool,
    header: str,
    in_blocks: bool,
) -> None:
    whole, right_length = body_of(sizes, surplus)
    body = whole[: max(len(whole) - lost, 0)]
    header_length = {"right": right_length, "none": None}.get(header, header)
    blocks = Blocks()
    scanner = HttpBodyScanner(
        BodyHead("m", "1", header_length, len(body) if length_known else None, RAW_MODEL),
        blocks.allocate if in_blocks else no_block,
        LIMIT_NBYTES,
        share(),
    )
    expected = outcome(lambda: parse_infer_request("m", "1", body, header_length, RAW_MODEL))
    found = outcome(lambda: scan(scanner, chunks_of(body, cuts)))
    if header == "-1" and not length_known:  # refused at once, before the length could be told
        found = InvalidArgument, found[1].replace("2147483647", str(len(body)))
    assert found == expected
    if isinstance(expected[0], type):
        assert scanner.blocks == blocks.given
    else:
        assert scanner.blocks == []


def test_large_tensors_are_in_blocks_and_small_ones_in_heap_bytes() -> None:
    body, header_length = body_of([LARGE_NBYTES, LARGE_NBYTES - 1])
    blocks = Blocks()
    scanner = scanner_of("m", "", header_length, len(body), allocate=blocks.allocate)
    scanner.feed(memoryview(body))
    request, _ = scanner.finish()
    assert request.inputs[1].data is blocks.given[0]
    assert isinstance(request.inputs[2].data, bytes)
    assert [block.nbytes for block in blocks.given] == [LARGE_NBYTES]


def test_a_raw_request_of_known_length_is_in_a_block_with_its_prefix() -> None:
    blocks = Blocks()
    scanner = scanner_of("m", "", "0", LARGE_NBYTES, RAW_MODEL, allocate=blocks.allocate)
    scanner.feed(b"a" * LARGE_NBYTES)
    scanner.finish()
    assert bytes(blocks.given[0].view) == LARGE_NBYTES.to_bytes(4, "little") + b"a" * LARGE_NBYTES


def test_blocks_are_the_callers_until_the_end() -> None:
    body, header_length = body_of([LARGE_NBYTES, LARGE_NBYTES])
    blocks = Blocks()
    scanner = scanner_of("m", "", header_length, None, allocate=blocks.allocate)
    scanner.feed(body[:-LARGE_NBYTES])
    assert scanner.blocks == blocks.given[:1], "the second tensor has not begun"
    scanner.feed(body[-LARGE_NBYTES:-1])
    with pytest.raises(InvalidArgument, match="expecting 1 additional bytes"):
        scanner.finish()
    assert len(scanner.blocks) == 2


@pytest.mark.parametrize("size", [LARGE_NBYTES, 1 << 40])
def test_nothing_is_allocated_where_the_length_contradicts_the_header(size: int) -> None:
    entry = {"name": "x", "datatype": "UINT8", "shape": [size], "parameters": {"binary_data_size": size}}
    text = json.dumps({"inputs": [entry]}).encode()
    blocks = Blocks()
    scanner = scanner_of("m", "", str(len(text)), len(text) + 1, allocate=blocks.allocate)
    with pytest.raises(InvalidArgument, match=f"expecting {size - 1} additional bytes"):
        scanner.feed(text + b"1")
    assert blocks.given == []


class TestLimits:
    def test_announced_by_the_content_length(self) -> None:
        scanner = HttpBodyScanner(BodyHead("m", "", None, 11), no_block, 10, share())
        with pytest.raises(ResourceExhausted, match="request size of 11 bytes exceeds the maximum"):
            scanner.feed(b"{")

    @pytest.mark.parametrize("header_length", [None, "0", "1000"])
    def test_reached_by_chunks(self, header_length: str | None) -> None:
        scanner = HttpBodyScanner(BodyHead("m", "", header_length, None, RAW_MODEL), no_block, 10, share())
        scanner.feed(b" " * 10)
        with pytest.raises(ResourceExhausted, match="request size of 11 bytes exceeds the maximum"):
            scanner.feed(b" ")

    def test_announced_by_a_tensor(self) -> None:
        body, header_length = body_of([LIMIT_NBYTES + 1])
        blocks = Blocks()
        scanner = scanner_of("m", "", header_length, None, allocate=blocks.allocate)
        with pytest.raises(ResourceExhausted):
            scanner.feed(body[:2000])
        assert blocks.given == []


@pytest.mark.parametrize("header_length", [None, "13"])
def test_a_body_without_tensors(header_length: str | None) -> None:
    scanner = scanner_of("m", "", header_length, None)
    scanner.feed(b'{"inputs":[]}')
    request, _ = scanner.finish()
    assert request.inputs == []


def test_what_is_announced_takes_memory_only_as_it_comes() -> None:
    announced = 1 << 30
    size = {"binary_data_size": announced}
    entry = {"name": "x", "datatype": "UINT8", "shape": [announced], "parameters": size}
    text = json.dumps({"inputs": [entry]}).encode()
    held = share()
    head = BodyHead("m", "", str(len(text)), len(text) + announced)
    scanner = HttpBodyScanner(head, no_block, 2 * announced, held)
    tracemalloc.start()
    try:
        scanner.feed(text + bytes(1 << 20))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert held.nbytes == len(text) + (1 << 20)
