"""How much of a body is in one message, and how much of one exchange is on its way at once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gpuserve.front.exchange.exchange import Piece

#: A message with so much fits into a datagram.
PIECE_NBYTES: Final = 64 << 10
#: What of one response may be on its way to a door.
WINDOW_NBYTES: Final = 256 << 10
#: A door says that it has room for more once it has sent so much.
CREDIT_NBYTES: Final = 64 << 10


def pieces(body: Sequence[Piece], nbytes: int) -> list[Piece]:
    """A body of so many bytes for as many messages as it takes, at least one; large ones are not copied."""
    if nbytes <= PIECE_NBYTES:
        return [b"".join(body)]
    return [
        memoryview(one)[start : start + PIECE_NBYTES]
        for one in body
        for start in range(0, len(one), PIECE_NBYTES)
    ]
