"""Lines for a descriptor that nobody reads."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest

from gpuserve.settings.log_writer import LineWriter

LINE = "x" * 999 + "\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """The descriptors of a pipe: what is read from, and what is written to."""
    fds = os.pipe()
    yield fds
    for fd in fds:
        os.close(fd)


def gap(dropped: int) -> str:
    return f"{dropped} dropped\n"


def accounted(taken: bytes) -> int:
    """How many lines are there, or told to be dropped; there may be a gap while the pipe still takes some."""
    whole = taken.decode()[: taken.rfind(b"\n") + 1].splitlines(keepends=True)
    gaps = [line for line in whole if line != LINE]
    return len(whole) - len(gaps) + sum(int(line.removesuffix(" dropped\n")) for line in gaps)


def test_lines_are_written_in_their_order(pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    writer = LineWriter(write_fd, gap)
    for number in range(1000):
        writer.write(f"{number}\n")
    writer.flush()
    assert os.read(read_fd, 1 << 16).decode().split() == [str(number) for number in range(1000)]


def test_nobody_reads_and_nobody_waits(pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    writer = LineWriter(write_fd, gap, max_nbytes=64 * 1024)
    began = time.monotonic()
    for _ in range(1000):
        writer.write(LINE)
    writer.flush(0.05)
    assert time.monotonic() - began < 1.0

    taken = b""
    while accounted(taken) < 1000:
        taken += os.read(read_fd, 1 << 16)
    assert accounted(taken) == 1000
    assert b"dropped" in taken
    writer.write("after\n")
    writer.flush()
    assert os.read(read_fd, 1 << 16) == b"after\n"


def test_a_line_larger_than_what_may_wait_is_written_alone(pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    writer = LineWriter(write_fd, gap, max_nbytes=100)
    writer.write(LINE)
    writer.flush()
    writer.write("after\n")
    writer.flush()
    assert os.read(read_fd, 1 << 16).decode() == f"{LINE}after\n"


def test_a_reader_that_went_away_stops_nobody(pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    end = os.open(os.devnull, os.O_RDONLY)
    os.dup2(end, read_fd)
    os.close(end)
    writer = LineWriter(write_fd, gap)
    for _ in range(3):
        writer.write(LINE)
    writer.flush(5.0)
    assert writer._nbytes == 0


def test_a_pipe_that_does_not_block_loses_nothing(pipe: tuple[int, int]) -> None:
    read_fd, write_fd = pipe
    os.set_blocking(write_fd, False)
    writer = LineWriter(write_fd, gap)
    for _ in range(200):
        writer.write(LINE)
    taken = b""
    while len(taken) < 200 * len(LINE):
        taken += os.read(read_fd, 1 << 16)
    assert taken.decode() == LINE * 200
