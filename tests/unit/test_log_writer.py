"""Lines for a descriptor that nobody reads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from gpuserve.config.settings.logs import MAX_QUEUED_NBYTES, LineWriter

LINE = "x" * 999 + "\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """The descriptors of a pipe: what is read from, and what is written to."""
    fds = os.pipe()
    yield fds
    for fd in fds:
        os.close(fd)


@pytest.fixture
def made(pipe: tuple[int, int]) -> Iterator[Callable[..., LineWriter]]:
    """Makes what writes to that pipe; its thread ends with the test."""
    writers: list[LineWriter] = []

    def make(max_nbytes: int = MAX_QUEUED_NBYTES) -> LineWriter:
        writers.append(LineWriter(pipe[1], gap, max_nbytes))
        return writers[-1]

    yield make
    for writer in writers:
        writer.close()
    assert [one for one in threading.enumerate() if one.name == "gpuserve-log"] == []


def gap(dropped: int, reason: str) -> str:
    return f"{dropped} dropped{reason and f' ({reason})'}\n"


def accounted(taken: bytes) -> int:
    """How many lines are there, or told to be dropped; there may be a gap while the pipe still takes some."""
    whole = taken.decode()[: taken.rfind(b"\n") + 1].splitlines(keepends=True)
    gaps = [line for line in whole if line != LINE]
    return len(whole) - len(gaps) + sum(int(line.removesuffix(" dropped\n")) for line in gaps)


def test_lines_are_written_in_their_order(pipe: tuple[int, int], made: Callable[..., LineWriter]) -> None:
    read_fd, _ = pipe
    writer = made()
    for number in range(1000):
        writer.write(f"{number}\n")
    writer.flush()
    assert os.read(read_fd, 1 << 16).decode().split() == [str(number) for number in range(1000)]


def test_nobody_reads_and_nobody_waits(pipe: tuple[int, int], made: Callable[..., LineWriter]) -> None:
    read_fd, _ = pipe
    writer = made(max_nbytes=64 * 1024)
    began = time.monotonic()
    for _ in range(1000):
        writer.write(LINE)
    writer.flush(0.05)
    assert time.monotonic() - began < 10

    taken = b""
    while accounted(taken) < 1000:
        taken += os.read(read_fd, 1 << 16)
    assert accounted(taken) == 1000
    assert b"dropped" in taken
    writer.write("after\n")
    writer.flush()
    assert os.read(read_fd, 1 << 16) == b"after\n"


def test_a_line_larger_than_what_may_wait_is_written_alone(
    pipe: tuple[int, int], made: Callable[..., LineWriter]
) -> None:
    read_fd, _ = pipe
    writer = made(max_nbytes=100)
    writer.write(LINE)
    writer.flush()
    writer.write("after\n")
    writer.flush()
    assert os.read(read_fd, 1 << 16).decode() == f"{LINE}after\n"


def test_a_reader_that_went_away_stops_nobody(pipe: tuple[int, int], made: Callable[..., LineWriter]) -> None:
    read_fd, _ = pipe
    end = os.open(os.devnull, os.O_RDONLY)
    os.dup2(end, read_fd)
    os.close(end)
    writer = made()
    for _ in range(3):
        writer.write(LINE)
    writer.flush(5.0)
    assert writer._nbytes == 0


def test_lines_lost_on_a_full_disk_are_counted_once_there_is_room(
    pipe: tuple[int, int], made: Callable[..., LineWriter]
) -> None:
    read_fd, write_fd = pipe
    room, full = os.dup(write_fd), os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, write_fd)
    os.close(full)
    writer = made()
    for _ in range(3):
        writer.write(LINE)
        writer.flush(5.0)
    os.dup2(room, write_fd)
    os.close(room)
    writer.write("after\n")
    writer.flush(5.0)
    assert os.read(read_fd, 1 << 16) == b"after\n3 dropped (No space left on device)\n"


def test_a_pipe_that_does_not_block_loses_nothing(
    pipe: tuple[int, int], made: Callable[..., LineWriter]
) -> None:
    read_fd, write_fd = pipe
    os.set_blocking(write_fd, False)
    writer = made()
    for _ in range(200):
        writer.write(LINE)
    taken = b""
    while len(taken) < 200 * len(LINE):
        taken += os.read(read_fd, 1 << 16)
    assert taken.decode() == LINE * 200


def test_a_line_that_comes_after_the_end_is_written(
    pipe: tuple[int, int], made: Callable[..., LineWriter]
) -> None:
    writer = made()
    for text in ("before\n", "after\n"):
        writer.write(text)
        writer.close()
        assert os.read(pipe[0], 1 << 16).decode() == text
