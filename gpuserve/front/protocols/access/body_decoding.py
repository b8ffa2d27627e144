"""Decoding of request bodies: decompression with limits, work in threads, and errors for clients.

Compressed data is inflated slice by slice, so that limits apply while it grows. zlib releases the GIL, so
slices can be made in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from functools import partial
from typing import Final, NamedTuple, ParamSpec, TypeAlias, TypeVar

from gpuserve.core.errors import Internal, InvalidArgument, RequestError, ResourceExhausted
from gpuserve.front.requests.inference import InferRequest
from gpuserve.front.requests.limits import InflationLimits
from gpuserve.front.requests.validation import SHORT_NBYTES, check_strings, has_long_strings

logger = logging.getLogger(__name__)


def client_error(error: Exception, what: str) -> RequestError:
    """Return the error to send to a client, without the traceback, whose frames refer to the body. An error
    that is not a ``RequestError`` is a defect: it is logged, and the client gets a generic error.
    """
    if isinstance(error, RequestError):
        error.__context__ = error.__cause__ = None
        return error.with_traceback(None)
    logger.error("defect while %s", what[:256], exc_info=error)
    return Internal("internal error of the server")


#: The zlib window bits of each coding, which also select the container format.
WINDOW_BITS: Final[dict[str, int]] = {"gzip": 31, "deflate": 15}
#: The size of the first slice, which may be made on the event loop, and of the others.
FIRST_NBYTES: Final = 64 << 10
SLICE_NBYTES: Final = 1 << 20
#: Input for one zlib call: zlib copies unused input.
_STEP_NBYTES: Final = 64 << 10
#: Up to this size a body may have any compression ratio.
FREE_NBYTES: Final = 8 << 20

Buffer: TypeAlias = bytes | bytearray | memoryview


class Slice(NamedTuple):
    """A part of the inflated data, possibly empty; ``more``: another slice follows."""

    data: bytes | memoryview
    more: bool


class Inflater:
    """The decompressor of one body or message in "gzip" or "deflate", whose data arrives in parts."""

    def __init__(self, coding: str, limits: InflationLimits) -> None:
        self._coding = coding
        self._limits = limits
        self._zlib = zlib.decompressobj(WINDOW_BITS[coding])
        self._input_nbytes = 0
        self._output_nbytes = 0

    def slices(self, data: Buffer, *, end: bool) -> Iterator[Slice]:
        """Yield the inflated slices of a part. Raise InvalidArgument, or ResourceExhausted if too large."""
        room, out, whole = FIRST_NBYTES, bytearray(), memoryview(data)
        for start in range(0, len(whole), _STEP_NBYTES):
            given: Buffer = whole[start : start + _STEP_NBYTES]
            self._input_nbytes += len(given)
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
        self._output_nbytes += len(made)
        most, ratio = self._limits
        if self._output_nbytes > most:
            raise ResourceExhausted(
                f"the request body exceeds the maximum allowed input size of {most} bytes after "
                "decompression (max_inflated_nbytes, max_request_nbytes)"
            )
        if self._output_nbytes > max(FREE_NBYTES, ratio * self._input_nbytes):
            raise ResourceExhausted(
                f"the request body comes to more than {ratio} times its {self._coding} data, expected less "
                f"from {FREE_NBYTES} bytes on (max_inflation_ratio)"
            )
        # A second gzip member is legal, but no client sends one, and a million empty members are an attack.
        if self._zlib.unused_data:
            raise InvalidArgument(f"the request body goes on behind the end of its {self._coding} data")
        return made


def inflate(data: Buffer, coding: str, limits: InflationLimits) -> bytes:
    """Return short data inflated at once. Raises the errors of ``Inflater.slices``."""
    return b"".join([one.data for one in Inflater(coding, limits).slices(data, end=True)])


#: Work on fewer bytes costs less than passing it to a thread.
THREAD_NBYTES: Final = 16 << 10

#: JSON up to this size takes at most 10 ms to parse.
_SHORT_JSON_NBYTES: Final = 64 << 10

P = ParamSpec("P")
T = TypeVar("T")


async def offload(nbytes: int, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """Return the result of ``work`` on ``nbytes``; a thread does the work if the size is worth it."""
    if nbytes < THREAD_NBYTES:
        return work(*arguments, **options)
    return await asyncio.to_thread(work, *arguments, **options)


async def read_off_loop(executor: Executor, body: bytes, read: Callable[[bytes], T]) -> T:
    """Return the result of ``read``, which parses JSON; in a thread of ``executor`` if the body is long."""
    if len(body) <= _SHORT_JSON_NBYTES:
        return read(body)
    return await asyncio.get_running_loop().run_in_executor(executor, read, body)


def run_off_loop(
    nbytes: int,
    work: Callable[[], T],
    then: Callable[[T | RequestError], None],
    executor: Executor | None = None,
) -> None:
    """Call ``then`` with the result of work on ``nbytes`` or its error: at once, or after a thread's work."""
    if nbytes < THREAD_NBYTES:
        then(result_or_error(work))
    else:
        working = asyncio.get_running_loop().run_in_executor(executor, result_or_error, work)
        working.add_done_callback(lambda done: then(done.result()))


def parse_off_loop(
    nbytes: int,
    parse: Callable[[], InferRequest],
    then: Callable[[InferRequest | RequestError], None],
    executor: Executor,
) -> None:
    """Call ``then`` as ``run_off_loop`` with the request that ``parse`` returns, or its error. The elements
    of long BYTES tensors are checked before, in a thread.
    """

    def on_parsed(found: InferRequest | RequestError) -> None:
        if isinstance(found, InferRequest) and has_long_strings(found):
            run_off_loop(SHORT_NBYTES, partial(check_strings, found), then, executor)
        else:
            then(found)

    run_off_loop(nbytes, parse, on_parsed, executor)


def inflate_off_loop(
    nbytes: int, slices: Iterator[Slice], take: Callable[[Slice | RequestError], bool]
) -> None:
    """Call ``take`` with each slice, made as by ``run_off_loop``, while it returns True, or with an error."""
    _SliceLoop(slices, take).next_slice(nbytes)


class _SliceLoop:
    """The state of ``inflate_off_loop``: a recursive closure would be a reference cycle with the body."""

    __slots__ = ("_slices", "_take")

    def __init__(self, slices: Iterator[Slice], take: Callable[[Slice | RequestError], bool]) -> None:
        self._slices = slices
        self._take = take

    def next_slice(self, nbytes: int) -> None:
        run_off_loop(nbytes, partial(next, self._slices), self._on_slice)

    def _on_slice(self, found: Slice | RequestError) -> None:
        if self._take(found) and not isinstance(found, RequestError) and found.more:
            self.next_slice(len(found.data))


def result_or_error(work: Callable[[], T]) -> T | RequestError:
    """Return the result of work, or the error for the client."""
    try:
        return work()
    except Exception as error:
        return client_error(error, "reading or packing a body")
