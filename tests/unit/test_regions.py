"""The region table: real memory in /dev/shm, real links to workers that are only an end of a socket."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from leaks import own_name

from gpuserve.core.errors import AlreadyExists, InvalidArgument, NotFound, RequestError, Unavailable
from gpuserve.front.ipc.shared_memory import RegionKind, RegionStatus, RegionTable
from gpuserve.front.ipc.worker_link import WorkerLink
from gpuserve.front.requests.inference import InferRequest, RegionSlice
from gpuserve_worker.protocol import datagram, wire

PAGE = os.sysconf("SC_PAGE_SIZE")
SYSTEM, CUDA = RegionKind.SYSTEM, RegionKind.CUDA
HANDLE = bytes(64)
TIMEOUT_S = 10.0


@pytest.fixture
def key() -> Iterator[str]:
    """The key of two pages of memory."""
    path = Path("/dev/shm") / own_name()
    path.write_bytes(bytes(2 * PAGE))
    yield f"/{path.name}"
    path.unlink(missing_ok=True)


@pytest.fixture
def table() -> Iterator[RegionTable]:
    before = open_fds()
    made = RegionTable(owners=(os.geteuid(),))
    yield made
    made.close()
    assert open_fds() == before


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def asking(*slices: RegionSlice) -> InferRequest:
    return InferRequest("m", "", "", {}, [], (), None, regions=slices)


def refusal(table: RegionTable, *given: object, kind: type[RequestError] = InvalidArgument) -> str:
    with pytest.raises(kind) as caught:
        table.register_system(*given)  # type: ignore[arg-type]
    return str(caught.value)


# ---- registration ------------------------------------------------------------------------


def test_a_region_is_listed_until_it_is_unregistered(table: RegionTable, key: str) -> None:
    table.register_system("a", key, 0, PAGE)
    table.register_system("b", key.lstrip("/"), PAGE, PAGE)
    one, other = RegionStatus("a", PAGE, key), RegionStatus("b", PAGE, key.lstrip("/"), PAGE)
    assert table.status(SYSTEM) == [one, other]
    assert table.status(SYSTEM, "b") == [other]
    table.unregister(SYSTEM, "a")
    assert table.status(SYSTEM) == [other]
    table.unregister(SYSTEM)
    assert table.status(SYSTEM) == []


def test_the_file_may_be_unlinked_once_it_is_registered_and_its_name_is_taken(
    table: RegionTable, key: str
) -> None:
    table.register_system("a", key, 0, PAGE)
    os.unlink(f"/dev/shm{key}")
    text = refusal(table, "a", key, 0, PAGE, kind=AlreadyExists)
    assert text == "shared memory region 'a' already in manager"
    assert [one.name for one in table.status(SYSTEM)] == ["a"]


@pytest.mark.parametrize("wrong", ["", "/", "///", "/a/b", "a/b", "/..", ".", "a\0b", "/" + "x" * 256])
def test_a_key_is_a_name_in_shared_memory(table: RegionTable, wrong: str) -> None:
    text = refusal(table, "a", wrong, 0, 1)
    assert text.startswith("cannot register shared memory region 'a' - invalid shm key '")


@pytest.mark.parametrize("slashes", ["", "/", "///"])
def test_keys_of_another_servers_own_memory_are_refused(table: RegionTable, slashes: str) -> None:
    name = f"{slashes}triton_python_backend_shm_region_1"
    assert refusal(table, "a", name, 0, 1) == (
        f"cannot register shared memory region 'a' with key '{name}' as the key contains the reserved prefix "
        "'triton_python_backend_shm_region_'"
    )


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (0, 2 * PAGE + 1),
        (PAGE, PAGE + 1),
        (2 * PAGE, 1),
        (0, 0),
        (1, 1),
        (PAGE, (1 << 64) - PAGE),
        ((1 << 64) - PAGE, 2 * PAGE),
        ((1 << 64) - 32, 64),
        (-PAGE, PAGE),
        (0, -1),
    ],
)
def test_a_region_lies_inside_of_its_file(table: RegionTable, key: str, offset: int, nbytes: int) -> None:
    text = refusal(table, "a", key, offset, nbytes)
    assert text.startswith("failed to register shared memory region 'a': invalid args")


@pytest.mark.parametrize(
    "make", [lambda _: None, Path.mkdir, os.mkfifo, lambda path: path.symlink_to("/etc/passwd")]
)
def test_what_is_missing_and_what_is_no_file_of_ours_look_alike(table: RegionTable, make: Any) -> None:
    path = Path("/dev/shm") / own_name()
    make(path)
    text = refusal(table, "a", f"/{path.name}", 0, 1, kind=NotFound)
    assert text == f"Unable to open shared memory region: '/{path.name}'"
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_memory_of_other_users_needs_the_setting(key: str) -> None:
    os.chown(f"/dev/shm{key}", 54321, -1)
    stranger, friend = RegionTable(), RegionTable(owners=(54321,))
    text = f"Unable to open shared memory region: '{key}'"
    assert refusal(stranger, "a", key, 0, PAGE, kind=NotFound) == text
    friend.register_system("a", key, 0, PAGE)
    friend.allow(())
    assert refusal(friend, "b", key, 0, PAGE, kind=NotFound) == text
    stranger.allow((54321,))
    stranger.register_system("a", key, 0, PAGE)
    friend.close()
    stranger.close()


def test_memory_is_registered_by_the_user_whom_it_belongs_to(
    key: str, caplog: pytest.LogCaptureFixture
) -> None:
    own, table = os.geteuid(), RegionTable()
    text = f"Unable to open shared memory region: '{key}'"
    for client in (None, own + 1, own + 1):
        assert refusal(table, "a", key, 0, PAGE, client, kind=NotFound) == text
    (told,) = caplog.messages  # and not one for each
    assert f"'{key}' of user {own} is not registered for a client whose user is not known" in told
    table.register_system("a", key, 0, PAGE, own)
    table.close()


def test_a_region_has_a_name_of_a_length_that_can_be_kept_and_its_kind_counts(
    table: RegionTable, key: str
) -> None:
    text = "'region name' is necessary to register system shared memory region"
    assert refusal(table, "", key, 0, 1) == text
    assert "longer than 1024 bytes" in refusal(table, "é" * 513, key, 0, 1)
    table.register_system("a", key, 0, PAGE)
    text = "The region named 'a' is registered as system shared memory, not CUDA shared memory"
    with pytest.raises(InvalidArgument, match=text):
        table.status(CUDA, "a")
    with pytest.raises(InvalidArgument, match=text):
        table.unregister(CUDA, "a")
    table.unregister(CUDA)
    assert table.status(SYSTEM, "a")[0].name == "a"


def test_ten_thousand_registrations_leave_no_descriptor(table: RegionTable, key: str) -> None:
    before = open_fds()
    bad = [(key, 0, 3 * PAGE), (key, 1, 1), ("/none-such", 0, 1), ("/", 0, 1)]
    for number in range(10_000):
        with pytest.raises(RequestError):
            table.register_system("a", *bad[number % len(bad)])
        table.register_system("a", key, 0, PAGE)
        table.unregister(SYSTEM, "a")
    assert open_fds() == before


def test_what_is_not_there(table: RegionTable, key: str) -> None:
    with pytest.raises(NotFound, match="Unable to find system shared memory region: 'a'"):
        table.status(SYSTEM, "a")
    with pytest.raises(NotFound, match="Unable to find cuda shared memory region: 'a'"):
        table.status(CUDA, "a")
    table.unregister(SYSTEM, "a")
    table.unregister(CUDA, "a")
    table.unregister(CUDA)
    assert table.status(CUDA) == []


# ---- use ---------------------------------------------------------------------------------


def test_a_pinned_region_leaves_with_its_last_request(table: RegionTable, key: str) -> None:
    table.register_system("a", key, 0, PAGE)
    first, second = asking(RegionSlice("a", 0, 8), RegionSlice("a", 8, 8)), asking(RegionSlice("a", 0, 8))
    table.pin(first)
    table.pin(second)
    table.unregister(SYSTEM, "a")
    assert [one.name for one in table.status(SYSTEM)] == ["a"]
    with pytest.raises(NotFound, match="Unable to find shared memory region: 'a'"):
        table.pin(asking(RegionSlice("a", 0, 8)))
    assert "already in manager" in refusal(table, "a", key, 0, PAGE, kind=AlreadyExists)
    table.unpin(first)
    table.unregister(SYSTEM)  # once more changes nothing
    assert [one.name for one in table.status(SYSTEM)] == ["a"]
    table.unpin(second)
    assert table.status(SYSTEM) == []


def test_numbers_are_given_once(table: RegionTable, key: str) -> None:
    for number in range(1, 4):
        table.register_system("a", key, 0, PAGE)
        request = asking(RegionSlice("a", 0, 1))
        table.pin(request)
        assert request.regions[0].number == number
        table.unpin(request)
        table.unregister(SYSTEM, "a")


@pytest.mark.parametrize(
    ("offset", "nbytes", "what"),
    [
        (PAGE + 1, 0, "offset"),
        (1 << 70, 1, "offset"),
        (-1, 1, "offset"),
        (0, PAGE + 1, "offset + byte size"),
        (PAGE, 1, "offset + byte size"),
        (1, (1 << 64) - 1, "offset + byte size"),
    ],
)
def test_a_place_outside_pins_nothing(
    table: RegionTable, key: str, offset: int, nbytes: int, what: str
) -> None:
    table.register_system("a", key, 0, PAGE)
    with pytest.raises(InvalidArgument) as caught:
        table.pin(asking(RegionSlice("a", 0, 8), RegionSlice("a", offset, nbytes)))
    assert str(caught.value).startswith(f"Invalid {what} for shared memory region: 'a'")
    table.unregister(SYSTEM, "a")
    assert table.status(SYSTEM) == []


def test_the_whole_region_and_nothing_at_its_end_are_inside(table: RegionTable, key: str) -> None:
    table.register_system("a", key, 0, PAGE)
    request = asking(RegionSlice("a", 0, PAGE), RegionSlice("a", PAGE, 0))
    table.pin(request)
    assert [one.number for one in request.regions] == [1, 1]


# ---- workers -----------------------------------------------------------------------------


class Worker:
    """The other end of a link."""

    def __init__(self) -> None:
        ours, self.end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.end.settimeout(TIMEOUT_S)
        alive = os.memfd_create("pidfd")  # its process is this one; nobody waits for it
        self.link = WorkerLink("i", 1, ours, alive, 1, lambda *_: False, lambda *_: None)
        self._buffer = memoryview(bytearray(datagram.MAX_DATAGRAM_NBYTES))

    def hear(self) -> wire.Message:
        data, fds = datagram.receive(self.end, self._buffer)
        self.fds = [os.fstat(fd) for fd in fds]
        datagram.close_all(fds)
        return wire.WORKER.decode(data)

    def hears_nothing(self) -> bool:
        self.end.setblocking(False)
        try:
            datagram.receive(self.end, self._buffer)
        except BlockingIOError:
            return True
        finally:
            self.end.settimeout(TIMEOUT_S)
        return False

    def close(self) -> None:
        self.link.close()
        self.end.close()


async def test_a_worker_is_told_once_and_told_of_the_end(table: RegionTable, key: str) -> None:
    worker, other = Worker(), Worker()
    table.register_system("a", key, PAGE, PAGE)
    table.announce(worker.link, {1})
    table.announce(worker.link, {1})
    assert worker.hear() == wire.Region(1, PAGE, PAGE)
    assert [one.st_ino for one in worker.fds] == [os.stat(f"/dev/shm{key}").st_ino]
    table.unregister(SYSTEM, "a")
    assert worker.hear() == wire.DropRegion(1)
    assert worker.hears_nothing()
    assert other.hears_nothing()
    worker.close()
    other.close()


async def test_a_new_worker_is_told_what_the_old_one_knew(table: RegionTable, key: str) -> None:
    table.register_system("a", key, 0, PAGE)
    for _ in range(2):
        worker = Worker()
        table.announce(worker.link, {1})
        assert worker.hear() == wire.Region(1, 0, PAGE)
        worker.close()
    table.unregister(SYSTEM, "a")


def cuda(answer: str | None, *, closes: bool = False) -> tuple[RegionTable, list[wire.Message]]:
    """A table after the registration of a CUDA region that its worker answered so."""
    told: list[wire.Message] = []

    async def scenario() -> RegionTable:
        worker, stranger = Worker(), Worker()
        table = RegionTable(lambda device: [worker.link] if device == "cuda:0" else [])
        registering = asyncio.ensure_future(table.register_cuda("g", HANDLE, 0, 128))
        await asyncio.sleep(0)
        told.append(worker.hear())
        assert table.status(CUDA) == []
        table.opened(stranger.link, 1, "not asked")
        if answer is not None:
            table.opened(worker.link, 1, answer)
        if closes:
            worker.link.close()
        try:
            await registering
            table.unregister(CUDA, "g")
            told.append(worker.hear())
        except RequestError:
            if not closes:
                told.append(worker.hear())
            raise
        finally:
            worker.close()
            stranger.close()
        return table

    return asyncio.run(scenario()), told


def test_a_cuda_region_is_opened_by_a_worker_of_its_device_that_may_refuse_or_die() -> None:
    _, told = cuda("")
    assert told == [wire.CudaRegion(1, 0, 128, HANDLE), wire.DropRegion(1)]
    with pytest.raises(
        InvalidArgument, match="failed to register CUDA shared memory region: 'g': invalid handle"
    ):
        cuda("invalid handle")
    with pytest.raises(Unavailable, match="died"):
        cuda(None, closes=True)


@pytest.mark.parametrize(
    ("handle", "device", "nbytes", "text"),
    [
        (bytes(63), 0, 8, "a cudaIpcMemHandle_t of 64 bytes, got 63"),
        (b"\2e" + bytes(28), 0, 8, "memory of PyTorch's expandable segments: start the client with "),
        (b"\2c" + bytes(64), 0, 8, "got the 66 bytes of PyTorch's, whose last 64 are one"),
        (HANDLE, -1, 8, "'device_id'"),
        (HANDLE, 0, 0, "'byte_size'"),
        (HANDLE, 3, 8, "GPUs not supported"),
    ],
)
def test_what_no_worker_is_asked(
    table: RegionTable, handle: bytes, device: int, nbytes: int, text: str
) -> None:
    with pytest.raises(InvalidArgument, match=text) as caught:
        asyncio.run(table.register_cuda("g", handle, device, nbytes))
    assert str(caught.value).startswith("failed to register CUDA shared memory region: 'g'")
    assert table.status(CUDA) == []
