"""The heads that a connection remembers: those that come again, and not many."""

from __future__ import annotations

import pytest

from gpuserve.front.net.exchange import Head
from gpuserve.front.net.http2_frames import (
    END_HEADERS,
    REMEMBERED_HEADS,
    REMEMBERED_NBYTES,
    HeaderBlock,
    HeaderBlockReader,
)
from gpuserve.front.net.http2_hpack import Encoder

PLAIN = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/"), (b":authority", b"a")]


def read(reader: HeaderBlockReader, number: int, nbytes: int) -> Head:
    told = [(b"x-number", b"%d" % number), (b"x-long", b"x" * nbytes)]
    return reader.head(HeaderBlock(1, END_HEADERS, Encoder(0).encode([*PLAIN, *told])))


@pytest.mark.parametrize("nbytes", [1, 200, 1800, REMEMBERED_NBYTES])
def test_a_connection_holds_few_heads_however_many_come(nbytes: int) -> None:
    reader = HeaderBlockReader()
    for number in range(100):
        head = read(reader, number, nbytes)
        assert dict(head.headers)[b"x-number"] == b"%d" % number
        assert len(reader.heads) <= REMEMBERED_HEADS
        assert sum(map(len, reader.heads)) <= REMEMBERED_NBYTES
        assert head in reader.heads.values() or nbytes == REMEMBERED_NBYTES
