"""Messages of every size cross a link, and no descriptor is lost on any path."""

from __future__ import annotations

import array
import fcntl
import os
import socket
from collections.abc import Iterator

import pytest

from gpuserve_worker.protocol import datagram, wire
from gpuserve_worker.protocol.link import Link

TIMEOUT_S = 20.0


def open_fds() -> set[str]:
    return set(os.listdir("/proc/self/fd"))


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link, socket.socket]]:
    """Two ends of a link and the raw socket of the first; no descriptor may be left over."""
    before = open_fds()
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    left.settimeout(TIMEOUT_S)
    right.settimeout(TIMEOUT_S)
    yield Link(left), Link(right), left
    left.close()
    right.close()
    assert open_fds() == before


def log_of(nbytes: int) -> wire.Log:
    return wire.Log(40, "x" * nbytes, "")


@pytest.mark.parametrize(
    "nbytes", [1, datagram.MAX_DATAGRAM_NBYTES - 100, datagram.MAX_DATAGRAM_NBYTES, 5 << 20]
)
def test_messages_of_any_size_arrive_whole(ends: tuple[Link, Link, socket.socket], nbytes: int) -> None:
    sender, receiver, _ = ends
    sender.send(log_of(nbytes))
    assert receiver.receive() == (log_of(nbytes), [])


def test_a_descriptor_arrives_close_on_exec(ends: tuple[Link, Link, socket.socket]) -> None:
    sender, receiver, _ = ends
    memory = os.memfd_create("test")
    sender.send(wire.Segment(3, 10), (memory,))
    received = receiver.receive()
    assert received is not None
    message, (fd,) = received
    assert message == wire.Segment(3, 10)
    assert os.path.sameopenfile(fd, memory)
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(fd)
    os.close(memory)


def test_the_end_is_none(ends: tuple[Link, Link, socket.socket]) -> None:
    sender, receiver, _ = ends
    sender.send(wire.Stop())
    sender.close()
    assert receiver.receive() == (wire.Stop(), [])
    assert receiver.receive() is None


def test_a_receiver_can_be_told_to_stop_and_still_send(ends: tuple[Link, Link, socket.socket]) -> None:
    left, right, _ = ends
    right.stop_receiving()
    assert right.receive() is None
    right.send(wire.Stop())
    assert left.receive() == (wire.Stop(), [])


def test_try_send_does_not_wait(ends: tuple[Link, Link, socket.socket]) -> None:
    sender, receiver, raw = ends
    raw.settimeout(None)  # with a timeout Python itself waits for room in the buffer
    sent = 0
    while sender.try_send(log_of(60_000)):
        sent += 1
    assert sent > 0
    for _ in range(sent):
        assert receiver.receive() == (log_of(60_000), [])
    receiver.close()
    assert not sender.try_send(wire.Stop())


@pytest.mark.parametrize("message", [wire.Stop(), wire.Segment(1, 1)], ids=["too many", "too few"])
def test_descriptors_that_do_not_belong_to_the_message(
    ends: tuple[Link, Link, socket.socket], message: wire.Message
) -> None:
    sender, receiver, _ = ends
    memory = os.memfd_create("test")
    sender.send(message, () if isinstance(message, wire.Segment) else (memory, memory))
    os.close(memory)
    with pytest.raises(wire.WireError, match="descriptors"):
        receiver.receive()


def test_garbage_with_a_descriptor(ends: tuple[Link, Link, socket.socket]) -> None:
    _, receiver, raw = ends
    memory = os.memfd_create("test")
    socket.send_fds(raw, [b"\x93\x01"], [memory])
    os.close(memory)
    with pytest.raises(wire.WireError):
        receiver.receive()


def test_a_spill_without_its_memory(ends: tuple[Link, Link, socket.socket]) -> None:
    _, receiver, raw = ends
    raw.send(bytes([datagram.SPILLED]))
    with pytest.raises(OSError, match="without its memory"):
        receiver.receive()


def test_a_spill_that_cannot_be_read(ends: tuple[Link, Link, socket.socket]) -> None:
    _, receiver, raw = ends
    directory = os.open("/", os.O_RDONLY)
    memory = os.memfd_create("test")
    socket.send_fds(raw, [bytes([datagram.SPILLED])], [directory, memory])
    os.close(memory)
    os.close(directory)
    with pytest.raises(IsADirectoryError):
        receiver.receive()


def test_a_datagram_that_is_too_large_or_brings_too_much(ends: tuple[Link, Link, socket.socket]) -> None:
    _, receiver, raw = ends
    raw.send(b"\x91\x02" + bytes(datagram.MAX_DATAGRAM_NBYTES))
    with pytest.raises(OSError, match="over"):
        receiver.receive()
    memory = os.memfd_create("test")
    rights = array.array("i", [memory] * (2 * datagram.MAX_FDS))
    raw.sendmsg([wire.WORKER.encode(wire.Stop())], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    os.close(memory)
    with pytest.raises(OSError, match="descriptors"):
        receiver.receive()


def test_a_failed_send_leaves_nothing_open(ends: tuple[Link, Link, socket.socket]) -> None:
    sender, receiver, _ = ends
    receiver.close()
    before = open_fds()
    with pytest.raises(BrokenPipeError):
        sender.send(log_of(1 << 20))
    assert open_fds() == before


def test_an_end_takes_memory_for_what_came_and_not_for_what_could_come() -> None:
    before = resident_nbytes()
    buffers = [datagram.receive_buffer() for _ in range(300)]
    assert {len(buffer) for buffer in buffers} == {datagram.MAX_DATAGRAM_NBYTES}
    assert resident_nbytes() - before < len(buffers) * datagram.MAX_DATAGRAM_NBYTES // 4


def resident_nbytes() -> int:
    """Of this process."""
    with open("/proc/self/statm") as fields:
        return int(fields.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
