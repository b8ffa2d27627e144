"""What it costs to read the bytes of others: CPU time and memory for each byte, whatever the bytes are."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any, Final

from hypothesis import strategies as st

from gpuserve.core.errors import RequestError

#: Objects that are made of a byte, in bytes, beside the reader's own.
PEAK_PER_BYTE: Final = 40
_PEAK_OF_READER: Final = 256 << 10
#: The largest body that is read on the event loop then takes 25 ms, which is all that a turn may. A longer
#: one is read by a thread, which keeps nobody from a turn.
_LOOP_NBYTES: Final = 64 << 10
_OF_READER_S: Final = 0.005
_PER_BYTE_S: Final = 0.3e-6
_PER_BYTE_OF_THREAD_S: Final = 2.5e-6
_TRIES: Final = 3


def check_cost(read: Callable[[bytes], Any], data: bytes) -> None:
    """Raise AssertionError if reading takes more CPU time or memory than so many bytes may."""
    is_short = len(data) <= _LOOP_NBYTES
    most_s = _OF_READER_S + (_PER_BYTE_S if is_short else _PER_BYTE_OF_THREAD_S) * len(data)
    took_s = _cpu_s(read, data)
    for _ in range(_TRIES):  # caches may be cold, and a collection may come meanwhile
        if took_s > most_s:
            took_s = min(took_s, _cpu_s(read, data))
    assert took_s <= most_s, (
        f"{len(data)} bytes took {took_s * 1e3:.1f} ms of CPU, expected at most {most_s * 1e3:.1f}"
    )
    tracemalloc.start()
    try:
        _read(read, data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    most = _PEAK_OF_READER + PEAK_PER_BYTE * len(data)
    assert peak <= most, f"{len(data)} bytes took {peak} bytes of memory, expected at most {most}"


def _cpu_s(read: Callable[[bytes], Any], data: bytes) -> float:
    began_s = time.thread_time()
    _read(read, data)
    return time.thread_time() - began_s


def _read(read: Callable[[bytes], Any], data: bytes) -> None:
    try:
        read(data)
    except RequestError:
        pass


def expensive(shapes: Mapping[str, Callable[[int], bytes]]) -> st.SearchStrategy[bytes]:
    """One of these shapes, of some size on either side of the largest that is read on the event loop."""
    sizes = st.sampled_from([16 << 10, 60 << 10, 63 << 10, 66 << 10, 300 << 10])
    return st.builds(lambda shape, nbytes: shape(nbytes), st.sampled_from(list(shapes.values())), sizes)


def repeated(units: st.SearchStrategy[bytes], around: st.SearchStrategy[bytes]) -> st.SearchStrategy[bytes]:
    """A unit that is repeated to some ten thousands of bytes, behind something else."""

    def made(before: bytes, unit: bytes, nbytes: int) -> bytes:
        return before + unit * (nbytes // max(1, len(unit)))

    return st.builds(made, around, units, st.sampled_from([20 << 10, 60 << 10, 100 << 10]))
