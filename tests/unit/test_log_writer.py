"""Lines for a descriptor that nobody reads."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator

import pytest

from gpuserve.config.settings.logs import MAX_QUEUED_NBYTES, LineWriter

LINE = "x" * 999 + "\n"


class Pipe:
    """A pipe, and the writers of lines to it."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe()
        self.writers: list[LineWriter] = []

    def writer(self, max_nbytes: int = MAX_QUEUED_NBYTES) -> LineWriter:
        self.writers.append(LineWriter(self.write_fd, gap, max_nbytes))
        return self.writers[-1]

    def read(self) -> bytes:
        return os.read(self.read_fd, 1 << 16)

    def redirect(self, fd: int, path: str, flags: int) -> None:
        """Have a descriptor of the pipe lead to another file."""
        other = os.open(path, flags)
        os.dup2(other, fd)
        os.close(other)


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    for writer in pipe.writers:
        writer.close()
    assert [one for one in threading.enumerate() if one.name == "gpuserve-log"] == []
    os.close(pipe.read_fd)
    os.close(pipe.write_fd)


def gap(dropped: int, reason: str) -> str:
    return f"{dropped} dropped{reason and f' ({reason})'}\n"


def accounted(taken: bytes) -> int:
    """How many lines are there, or told to be dropped; there may be a gap while the pipe still takes some."""
    whole = taken.decode()[: taken.rfind(b"\n") + 1].splitlines(keepends=True)
    gaps = [line for line in whole if line != LINE]
    return len(whole) - len(gaps) + sum(int(line.removesuffix(" dropped\n")) for line in gaps)


def test_lines_are_written_in_their_order(pipe: Pipe) -> None:
    writer = pipe.writer()
    for number in range(1000):
        writer.write(f"{number}\n")
    writer.flush()
    assert pipe.read().decode().split() == [str(number) for number in range(1000)]


def test_nobody_reads_and_nobody_waits(pipe: Pipe) -> None:
    writer = pipe.writer(max_nbytes=64 * 1024)
    began = time.monotonic()
    for _ in range(1000):
        writer.write(LINE)
    writer.flush(0.05)
    assert time.monotonic() - began < 10

    taken = b""
    while accounted(taken) < 1000:
        taken += pipe.read()
    assert accounted(taken) == 1000
    assert b"dropped" in taken
    writer.write("after\n")
    writer.flush()
    assert pipe.read() == b"after\n"


def test_a_line_larger_than_what_may_wait_is_written_alone(pipe: Pipe) -> None:
    writer = pipe.writer(max_nbytes=100)
    for line in (LINE, "after\n"):
        writer.write(line)
        writer.flush()
    assert pipe.read().decode() == f"{LINE}after\n"


def test_a_reader_that_went_away_stops_nobody(pipe: Pipe) -> None:
    pipe.redirect(pipe.read_fd, os.devnull, os.O_RDONLY)
    writer = pipe.writer()
    for _ in range(3):
        writer.write(LINE)
    writer.flush(5.0)
    assert writer._nbytes == 0


def test_lines_lost_on_a_full_disk_are_counted_once_there_is_room(pipe: Pipe) -> None:
    room = os.dup(pipe.write_fd)
    pipe.redirect(pipe.write_fd, "/dev/full", os.O_WRONLY)
    writer = pipe.writer()
    for _ in range(3):
        writer.write(LINE)
        writer.flush(5.0)
    os.dup2(room, pipe.write_fd)
    os.close(room)
    writer.write("after\n")
    writer.flush(5.0)
    assert pipe.read() == b"after\n3 dropped (No space left on device)\n"


def test_a_pipe_that_does_not_block_loses_nothing(pipe: Pipe) -> None:
    os.set_blocking(pipe.write_fd, False)
    writer = pipe.writer()
    for _ in range(200):
        writer.write(LINE)
    taken = b""
    while len(taken) < 200 * len(LINE):
        taken += pipe.read()
    assert taken.decode() == LINE * 200


def test_a_line_that_comes_after_the_end_is_written(pipe: Pipe) -> None:
    writer = pipe.writer()
    for text in ("before\n", "after\n"):
        writer.write(text)
        writer.close()
        assert pipe.read().decode() == text
