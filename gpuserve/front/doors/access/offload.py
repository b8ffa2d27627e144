"""Moves work on large bodies to a thread, where it lets the event loop go on. Both doors use it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from functools import partial
from typing import Final, ParamSpec, TypeVar

from gpuserve.core.errors import RequestError
from gpuserve.front.doors.access.failures import error_to_tell
from gpuserve.front.doors.access.inflation import Slice

#: From this size on; below, the way to a thread and back costs more than the work.
THREAD_NBYTES: Final = 16 << 10

#: JSON up to this size takes 10 ms at most.
_SHORT_JSON_NBYTES: Final = 64 << 10

P = ParamSpec("P")
T = TypeVar("T")


async def offload(nbytes: int, work: Callable[P, T], *arguments: P.args, **options: P.kwargs) -> T:
    """The result of ``work``, which packs or unpacks ``nbytes``."""
    if nbytes < THREAD_NBYTES:
        return work(*arguments, **options)
    return await asyncio.to_thread(work, *arguments, **options)


async def read_off_loop(executor: Executor, body: bytes, read: Callable[[bytes], T]) -> T:
    """The result of ``read``, which reads JSON: of a body that is not short in a thread of ``executor``."""
    if len(body) <= _SHORT_JSON_NBYTES:
        return read(body)
    return await asyncio.get_running_loop().run_in_executor(executor, read, body)


def off_loop(
    nbytes: int,
    work: Callable[[], T],
    then: Callable[[T | RequestError], None],
    executor: Executor | None = None,
) -> None:
    """Call ``then`` with the result of work on so many bytes, or with its error: now, or after a thread."""
    if nbytes < THREAD_NBYTES:
        then(result_of(work))
    else:
        working = asyncio.get_running_loop().run_in_executor(executor, result_of, work)
        working.add_done_callback(lambda done: then(done.result()))


def each_off_loop(nbytes: int, slices: Iterator[Slice], take: Callable[[Slice | RequestError], bool]) -> None:
    """Call ``take`` with slice after slice while it wants more, or with an error; each as by ``off_loop``."""
    _SliceBySlice(slices, take).go_on(nbytes)


class _SliceBySlice:
    """An object: a function that names itself would be left to the garbage collector, with the whole body."""

    __slots__ = ("_slices", "_take")

    def __init__(self, slices: Iterator[Slice], take: Callable[[Slice | RequestError], bool]) -> None:
        self._slices = slices
        self._take = take

    def go_on(self, nbytes: int) -> None:
        off_loop(nbytes, partial(next, self._slices), self._found)

    def _found(self, found: Slice | RequestError) -> None:
        if self._take(found) and not isinstance(found, RequestError) and found.more:
            self.go_on(len(found.data))


def result_of(work: Callable[[], T]) -> T | RequestError:
    """Return the result of work, or the error that a client is told."""
    try:
        return work()
    except Exception as error:
        return error_to_tell(error, "reading or packing a body")
