"""Shared-memory regions that clients have registered: their names, their use by requests, and which workers
know them. The front neither maps nor reads a region, because its client may shrink it at any time.

A name belongs to one region at a time, whatever its kind; numbers are never reused. The life of a region::

    OPENING ──(a worker opened it: CUDA)──► REGISTERED ──(unregister)──► LEAVING ──(last use ended)──► gone
       └──────(it could not)──► gone

A leaving region is still listed, but no new request may name it.
"""

from __future__ import annotations

import asyncio
import enum
import errno
import itertools
import logging
import os
import resource
import stat
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from gpuserve.config.settings.logs import RateLimitedLog
from gpuserve.core.errors import AlreadyExists, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from gpuserve.core.states import StepTable
from gpuserve.front.ipc.worker_link import WorkerLink
from gpuserve.front.requests.inference import InferRequest, RegionSlice
from gpuserve.front.requests.limits import shown, shown_dim
from gpuserve_worker.protocol import wire

logger = logging.getLogger(__name__)

#: The size of a ``cudaIpcMemHandle_t``.
HANDLE_NBYTES: Final = 64
#: Limited because a client decides how long a name is kept.
MAX_NAME_NBYTES: Final = 1024
MAX_REGIONS: Final = 4096
#: The time limit for opening a region. The worker may be in the middle of a batch.
_OPEN_TIMEOUT_S: Final = 30.0
_FOREIGN_OWNER: Final = (
    "shared memory '%s' of user %s is not registered for a client whose user is %s; shared_memory_owners "
    "lets any client register the memory of a user"
)
_MAX_UINT64: Final = (1 << 64) - 1
_CPU: Final = "cpu"


class RegionKind(enum.Enum):
    """The kind of memory of a region. The value is its name in error texts."""

    SYSTEM = "system"
    CUDA = "CUDA"


class RegionLife(enum.Enum):
    """The state of a region."""

    OPENING = "OPENING"
    REGISTERED = "REGISTERED"
    LEAVING = "LEAVING"


_LIVES: Final = StepTable(
    "region", {RegionLife.OPENING: {RegionLife.REGISTERED}, RegionLife.REGISTERED: {RegionLife.LEAVING}}
)


class RegionStatus(NamedTuple):
    """The description of a region for clients. ``key`` and ``offset`` are of system memory only."""

    name: str
    nbytes: int
    key: str = ""
    offset: int = 0
    device_id: int = 0

    def members(self, kind: RegionKind) -> dict[str, Any]:
        """Return the members of an answer about a region of this kind, as JSON and messages name them."""
        if kind is RegionKind.CUDA:
            return {"name": self.name, "device_id": self.device_id, "byte_size": self.nbytes}
        return {"name": self.name, "key": self.key, "offset": self.offset, "byte_size": self.nbytes}


@dataclass(eq=False, slots=True)
class RegisteredRegion:
    """One region. ``message`` announces it to a worker; ``uses`` counts the places that requests name."""

    kind: RegionKind
    number: int
    status: RegionStatus
    message: wire.Region | wire.CudaRegion
    fd: int | None
    life: RegionLife = RegionLife.OPENING
    uses: int = 0

    @property
    def device(self) -> str:
        return f"cuda:{self.status.device_id}" if self.kind is RegionKind.CUDA else ""

    def enter(self, life: RegionLife) -> None:
        self.life = _LIVES.step(self.life, life, self.number)

    def close(self) -> None:
        if self.fd is not None:
            os.close(self.fd)
            self.fd = None


class RegionTable:
    """All regions of a front. Clients may register memory of ``owners`` (uids), and each user its own."""

    def __init__(
        self,
        links_on: Callable[[str], Sequence[WorkerLink]] = lambda _: (),
        devices: Callable[[], Collection[str]] = tuple,
        owners: Iterable[int] = (),
    ) -> None:
        self._links_on = links_on
        self._devices = devices
        self.allow(owners)
        self._refusals = RateLimitedLog(logger)
        self._by_name: dict[str, RegisteredRegion] = {}
        self._by_number: dict[int, RegisteredRegion] = {}
        self._numbers = itertools.count(1)
        #: The regions that were announced to each worker.
        self._announced: dict[WorkerLink, set[int]] = {}
        self._opening: dict[int, tuple[WorkerLink, asyncio.Future[str]]] = {}

    def allow(self, owners: Iterable[int]) -> None:
        """Allow any client to register memory of these users from now on."""
        self._owners = frozenset(owners)

    # ---- registration ---------------------------------------------------------------------

    def register_system(
        self, name: str, key: str, offset: int, nbytes: int, client: int | None = None
    ) -> None:
        """Open ``nbytes`` from ``offset`` of ``key`` for user ``client``; raises RequestError."""
        _check_new(name, RegionKind.SYSTEM, self._by_name)
        if offset < 0 or nbytes <= 0 or offset + nbytes > _MAX_UINT64 or offset % resource.getpagesize():
            raise InvalidArgument(
                f"failed to register shared memory region '{shown(name)}': invalid args, expected an offset "
                f"that is a multiple of {resource.getpagesize()} and at least one byte, got offset "
                f"{shown_dim(offset)} and {shown_dim(nbytes)} bytes"
            )
        try:
            fd = open_shared_memory(name, key, offset + nbytes, self._owners | {client})
        except ForeignOwner as error:
            self._refusals.say(
                _FOREIGN_OWNER, shown(key), error.owner, "not known" if client is None else client
            )
            raise
        number = next(self._numbers)
        status = RegionStatus(name, nbytes, key, offset)
        region = RegisteredRegion(RegionKind.SYSTEM, number, status, wire.Region(number, offset, nbytes), fd)
        self._by_name[name] = self._by_number[number] = region
        region.enter(RegionLife.REGISTERED)

    async def register_cuda(self, name: str, raw_handle: bytes, device_id: int, nbytes: int) -> None:
        """Have a worker of the device open a ``cudaIpcMemHandle_t``. Raises RequestError if that fails."""
        _check_new(name, RegionKind.CUDA, self._by_name)
        _check_cuda(name, raw_handle, device_id, nbytes)
        link = self._link_on(f"cuda:{device_id}", name)
        number = next(self._numbers)
        message = wire.CudaRegion(number, device_id, nbytes, raw_handle)
        status = RegionStatus(name, nbytes, device_id=device_id)
        region = RegisteredRegion(RegionKind.CUDA, number, status, message, None)
        self._by_name[name] = self._by_number[number] = region
        try:
            await self._open(region, link)
        except BaseException:
            self._drop(region)
            raise
        region.enter(RegionLife.REGISTERED)

    def opened(self, link: WorkerLink, number: int, problem: str) -> None:
        """Process a worker's report that it opened a CUDA region, or the ``problem`` that prevented it."""
        asked, answer = self._opening.get(number, (None, None))
        if answer is not None and asked is link and not answer.done():
            answer.set_result(problem)

    def status(self, kind: RegionKind, name: str = "") -> list[RegionStatus]:
        """Return region ``name``, or all of the kind. Raises NotFound, InvalidArgument for another kind."""
        if not name:
            return [one.status for one in self._listed(kind)]
        region = self._by_name.get(name)
        if region is None or region.life is RegionLife.OPENING:
            raise NotFound(f"Unable to find {kind.value.lower()} shared memory region: '{shown(name)}'")
        _check_kind(region, kind)
        return [region.status]

    def unregister(self, kind: RegionKind, name: str = "") -> None:
        """Unregister region ``name``, or all of a kind, once unused; InvalidArgument for another kind."""
        region = self._by_name.get(name)
        if region is not None:
            _check_kind(region, kind)
        chosen = [region] if region is not None else []
        for one in chosen if name else self._listed(kind):
            if one.life is RegionLife.REGISTERED:
                one.enter(RegionLife.LEAVING)
                self._drop_if_unused(one)

    def close(self) -> None:
        for region in list(self._by_number.values()):
            self._remove(region)
        self._announced.clear()

    # ---- use ------------------------------------------------------------------------------

    def pin(self, request: InferRequest) -> None:
        """Keep the regions that a request names until ``unpin``. If one cannot be used, none is kept."""
        regions = [self._containing(one) for one in request.regions]
        for one, region in zip(request.regions, regions, strict=True):
            one.number = region.number
            one.device = region.device
            region.uses += 1

    def pin_for_step(self, request: InferRequest) -> None:
        """Keep the regions for a part of a pinned request, even if they were unregistered since."""
        for one in request.regions:
            region = self._by_number.get(one.number)
            if region is not None:
                region.uses += 1

    def unpin(self, request: InferRequest) -> None:
        for one in request.regions:
            region = self._by_number.get(one.number)
            if region is not None:  # otherwise the table was closed meanwhile
                region.uses -= 1
                if not region.uses:
                    self._drop_if_unused(region)

    def announce(self, link: WorkerLink, numbers: Iterable[int]) -> None:
        """Announce the regions of these numbers, which are in use, to a worker that does not know them."""
        known = self._announced.get(link)
        if known is None:
            known = self._announced[link] = set()
            link.on_close.append(self._forget)
        for number in numbers:
            if number not in known:
                known.add(number)
                region = self._by_number[number]
                link.send(region.message, () if region.fd is None else (region.fd,))

    # ---- inside ---------------------------------------------------------------------------

    def _listed(self, kind: RegionKind) -> list[RegisteredRegion]:
        of_kind = [one for one in self._by_name.values() if one.kind is kind]
        return [one for one in of_kind if one.life is not RegionLife.OPENING]

    def _containing(self, one: RegionSlice) -> RegisteredRegion:
        region = self._by_name.get(one.region)
        if region is None or region.life is not RegionLife.REGISTERED:
            raise NotFound(f"Unable to find shared memory region: '{shown(one.region)}'")
        size = region.status.nbytes
        if not 0 <= one.offset <= size:
            raise InvalidArgument(
                f"Invalid offset for shared memory region: '{shown(one.region)}', expected at most {size}, "
                f"got {shown_dim(one.offset)}"
            )
        if one.nbytes < 0 or one.offset + one.nbytes > size:
            raise InvalidArgument(
                f"Invalid offset + byte size for shared memory region: '{shown(one.region)}', expected at "
                f"most {size}, got {shown_dim(one.offset)} + {shown_dim(one.nbytes)}"
            )
        return region

    def _link_on(self, device: str, name: str) -> WorkerLink:
        links = self._links_on(device)
        if links:
            return links[0]
        devices = sorted(one for one in self._devices() if one != _CPU)
        if device in devices:
            raise Unavailable(f"{_cuda_failure(name)}, no instance on {shown(device)} is up")
        if devices:
            raise InvalidArgument(
                f"{_cuda_failure(name)}: invalid args, expected the 'device_id' of {', '.join(devices)}, on "
                f"which there are instances, got that of {shown(device)}"
            )
        raise InvalidArgument(f"{_cuda_failure(name)}, GPUs not supported: no instance runs on a GPU")

    async def _open(self, region: RegisteredRegion, link: WorkerLink) -> None:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._opening[region.number] = link, answer
        self.announce(link, (region.number,))
        try:
            problem = await asyncio.wait_for(answer, _OPEN_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(
                f"{_cuda_failure(region.status.name)}, the worker did not open it in {_OPEN_TIMEOUT_S:g} s"
            ) from None
        finally:
            del self._opening[region.number]
        if problem:
            raise InvalidArgument(f"{_cuda_failure(region.status.name)}: {problem}")

    def _drop_if_unused(self, region: RegisteredRegion) -> None:
        if region.life is RegionLife.LEAVING and not region.uses:
            self._drop(region)

    def _drop(self, region: RegisteredRegion) -> None:
        if self._by_number.get(region.number) is not region:
            return  # the table was closed meanwhile
        self._remove(region)
        for link, known in self._announced.items():
            if region.number in known:
                known.discard(region.number)
                link.send(wire.DropRegion(region.number))

    def _remove(self, region: RegisteredRegion) -> None:
        del self._by_name[region.status.name]
        del self._by_number[region.number]
        region.close()

    def _forget(self, link: WorkerLink) -> None:
        """Forget a worker that is gone, and fail the registrations that wait for it."""
        self._announced.pop(link, None)
        for asked, answer in self._opening.values():
            if asked is link and not answer.done():
                answer.set_exception(Unavailable("the worker that was to open the region died"))


def _check_new(name: str, kind: RegionKind, registered: Collection[str]) -> None:
    if not name:
        word = kind.value.lower()
        raise InvalidArgument(f"'region name' is necessary to register {word} shared memory region")
    if len(name.encode("utf-8", "replace")) > MAX_NAME_NBYTES:
        raise InvalidArgument(
            f"the name of shared memory region '{shown(name)}' is longer than {MAX_NAME_NBYTES} bytes"
        )
    if name in registered:
        raise AlreadyExists(f"shared memory region '{shown(name)}' already in manager")
    # Each takes a descriptor, and connections need most descriptors.
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_REGIONS if soft == resource.RLIM_INFINITY else min(MAX_REGIONS, soft // 4)
    if len(registered) >= most:
        raise ResourceExhausted(
            f"failed to register shared memory region '{shown(name)}': {len(registered)} regions are "
            "registered, which is as many as there may be"
        )


def _check_kind(region: RegisteredRegion, kind: RegionKind) -> None:
    if region.kind is not kind:
        raise InvalidArgument(
            f"The region named '{shown(region.status.name)}' is registered as {region.kind.value} shared "
            f"memory, not {kind.value} shared memory"
        )


_PLAIN_SEGMENTS: Final = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"


def _check_cuda(name: str, raw_handle: bytes, device_id: int, nbytes: int) -> None:
    problem = ""
    if len(raw_handle) != HANDLE_NBYTES:
        given = f"got {len(raw_handle)}"
        # PyTorch puts a version and the kind of the memory before a handle (CUDACachingAllocator).
        if raw_handle[1:2] == b"e":
            given = f"got memory of PyTorch's expandable segments: start the client with {_PLAIN_SEGMENTS}"
        elif raw_handle[1:2] == b"c" and len(raw_handle) == HANDLE_NBYTES + 2:
            given = f"got the {len(raw_handle)} bytes of PyTorch's, whose last {HANDLE_NBYTES} are one"
        problem = f"expected 'raw_handle' to be a cudaIpcMemHandle_t of {HANDLE_NBYTES} bytes, {given}"
    elif device_id < 0:
        problem = f"expected 'device_id' to be at least 0, got {shown_dim(device_id)}"
    elif not 0 < nbytes <= _MAX_UINT64:
        problem = f"expected 'byte_size' to be at least 1, got {shown_dim(nbytes)}"
    if problem:
        raise InvalidArgument(f"{_cuda_failure(name)}: invalid args, {problem}")


def _cuda_failure(name: str) -> str:
    return f"failed to register CUDA shared memory region: '{shown(name)}'"


#: The prefix of Triton's own regions. The workers of a Triton server on this machine trust their contents.
_RESERVED_PREFIX: Final = "triton_python_backend_shm_region_"
_MAX_NAME_NBYTES: Final = 255
_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class ForeignOwner(NotFound):
    """The memory belongs to a user ``owner`` (uid) that the client may not register memory of."""

    def __init__(self, key: str, owner: int) -> None:
        super().__init__(_not_found(key))
        self.owner = owner


def open_shared_memory(region: str, key: str, end: int, owners: Container[int | None]) -> int:
    """Return a descriptor, owned by the caller, of the POSIX shared memory ``key`` of at least ``end`` bytes.

    Raises InvalidArgument for a bad key or size, NotFound or ``ForeignOwner`` if the memory is not available,
    ResourceExhausted if no descriptor is left.
    """
    path = f"/dev/shm/{_file_name(region, key)}"
    try:
        fd = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise NotFound(_not_found(key)) from None
        raise ResourceExhausted(
            f"Unable to open shared memory region: '{shown(key)}', the server has too many files open"
        ) from None
    try:
        _check_file(os.fstat(fd), region, key, end, owners)
    except BaseException:
        os.close(fd)
        raise
    return fd


def _file_name(region: str, key: str) -> str:
    """Return the file name of a key as in ``shm_open``: leading slashes are dropped, others are invalid."""
    name = key.lstrip("/")
    is_name = name and not set(name) & {"/", "\0"} and name not in (".", "..")
    if not is_name or len(name.encode("utf-8", "surrogateescape")) > _MAX_NAME_NBYTES:
        raise InvalidArgument(
            f"cannot register shared memory region '{shown(region)}' - invalid shm key '{shown(key)}'"
        )
    if name.startswith(_RESERVED_PREFIX):
        raise InvalidArgument(
            f"cannot register shared memory region '{shown(region)}' with key '{shown(key)}' as the key "
            f"contains the reserved prefix '{_RESERVED_PREFIX}'"
        )
    return name


def _check_file(
    found: os.stat_result, region: str, key: str, end: int, owners: Container[int | None]
) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise NotFound(_not_found(key))
    if found.st_uid not in owners:
        raise ForeignOwner(key, found.st_uid)
    if end > found.st_size:
        raise InvalidArgument(
            f"failed to register shared memory region '{shown(region)}': invalid args, expected offset and "
            f"byte size to lie in the {found.st_size} bytes of '{shown(key)}', got an end at {end}"
        )


def _not_found(key: str) -> str:
    return f"Unable to open shared memory region: '{shown(key)}'"
