"""Compressed bodies and messages, inflated slice by slice, so that they are limited while they grow. Pure;
zlib releases the GIL, so a caller may have the slices made in a thread (``offload.py``).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple, TypeAlias

from gpuserve.core.errors import InvalidArgument, ResourceExhausted
from gpuserve.front.requests.limits import InflationLimits

#: coding -> zlib's window bits, which also say which container it is.
WINDOW_BITS: Final[dict[str, int]] = {"gzip": 31, "deflate": 15}
#: The first slice may be made in the event loop, and is short; the others measure this.
FIRST_NBYTES: Final = 64 << 10
SLICE_NBYTES: Final = 1 << 20
#: zlib is given so much at a time: what it has not used up it copies.
_STEP_NBYTES: Final = 64 << 10
#: Up to here a body may come to any number of times its size.
FREE_NBYTES: Final = 8 << 20

Buffer: TypeAlias = bytes | bytearray | memoryview


class Slice(NamedTuple):
    """A part of what was inflated, possibly empty; ``more``: another one comes."""

    data: bytes | memoryview
    more: bool


class Inflater:
    """One body or message in "gzip" or "deflate", whose data comes in any number of parts."""

    def __init__(self, coding: str, limits: InflationLimits) -> None:
        self._coding = coding
        self._limits = limits
        self._zlib = zlib.decompressobj(WINDOW_BITS[coding])
        self._taken_nbytes = 0
        self._made_nbytes = 0

    def slices(self, data: Buffer, *, end: bool) -> Iterator[Slice]:
        """What a part of data comes to; InvalidArgument: not of this coding; ResourceExhausted: too large."""
        room, out, whole = FIRST_NBYTES, bytearray(), memoryview(data)
        for start in range(0, len(whole), _STEP_NBYTES):
            given: Buffer = whole[start : start + _STEP_NBYTES]
            self._taken_nbytes += len(given)
            is_full = True
            while is_full:
                out += self._inflate(given, room - len(out))
                given = self._zlib.unconsumed_tail
                is_full = len(out) == room
                if is_full:
                    yield Slice(bytes(out), True)
                    room, out = SLICE_NBYTES, bytearray()
        if end and not self._zlib.eof:
            raise InvalidArgument(f"the {self._coding} data of the request body is truncated")
        yield Slice(bytes(out), False)

    def _inflate(self, data: Buffer, most_nbytes: int) -> bytes:
        try:
            made = self._zlib.decompress(data, most_nbytes)
        except zlib.error:
            coding = self._coding
            raise InvalidArgument(f"the request is marked as {coding}, but it is not {coding} data") from None
        self._made_nbytes += len(made)
        most, ratio = self._limits
        if self._made_nbytes > most:
            raise ResourceExhausted(
                f"the request body exceeds the maximum allowed input size of {most} bytes after "
                "decompression (max_inflated_nbytes, max_request_nbytes)"
            )
        if self._made_nbytes > max(FREE_NBYTES, ratio * self._taken_nbytes):
            raise ResourceExhausted(
                f"the request body comes to more than {ratio} times its {self._coding} data, expected less "
                f"from {FREE_NBYTES} bytes on (max_inflation_ratio)"
            )
        # A second gzip member is legal but nobody sends one; a million empty ones are an attack.
        if self._zlib.unused_data:
            raise InvalidArgument(f"the request body goes on behind the end of its {self._coding} data")
        return made


def inflate(data: Buffer, coding: str, limits: InflationLimits) -> bytes:
    """All that short data comes to. Raises what ``Inflater.slices`` does."""
    return b"".join([one.data for one in Inflater(coding, limits).slices(data, end=True)])
