"""The regions of shared memory that clients have registered: which there are, which requests use them, and
which workers know them. The front neither maps nor reads one; it hands them to the workers.

A name is one region's at a time, whatever its kind; numbers are never used again. The life of a region::

    OPENING ──(a worker opened it: CUDA)──► REGISTERED ──(unregister)──► LEAVING ──(last use ended)──► gone
       └──────(it could not)──► gone

A region that leaves is still listed, but no new request may name it.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
import os
import resource
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from gpuserve.config.settings.logs import RateLimitedLog
from gpuserve.core.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from gpuserve.core.states import StepTable
from gpuserve.front.links.worker_link import WorkerLink
from gpuserve.front.memory.posix_shm import SomebodyElses, open_shared_memory
from gpuserve.front.requests.inference import InferRequest, RegionSlice
from gpuserve.front.requests.limits import shown, shown_dim
from gpuserve_worker.protocol import wire

logger = logging.getLogger(__name__)

#: What a ``cudaIpcMemHandle_t`` measures.
HANDLE_NBYTES: Final = 64
#: Names are kept for as long as a client likes.
MAX_NAME_NBYTES: Final = 1024
MAX_REGIONS: Final = 4096
#: A worker may be in the middle of a batch when it is asked to open a region.
_OPEN_TIMEOUT_S: Final = 30.0
_SOMEBODY_ELSES: Final = (
    "shared memory '%s' of user %s is not registered for a client whose user is %s; shared_memory_owners "
    "lets any client register the memory of a user"
)
_MAX_UINT64: Final = (1 << 64) - 1
_CPU: Final = "cpu"


class RegionKind(enum.Enum):
    """What memory a region is of; the value is how error texts call it."""

    SYSTEM = "system"
    CUDA = "CUDA"


class RegionLife(enum.Enum):
    """What a region may be used for now."""

    OPENING = "OPENING"
    REGISTERED = "REGISTERED"
    LEAVING = "LEAVING"


_LIVES: Final = StepTable(
    "region", {RegionLife.OPENING: {RegionLife.REGISTERED}, RegionLife.REGISTERED: {RegionLife.LEAVING}}
)


class RegionStatus(NamedTuple):
    """A region as its clients are told of it. ``key`` and ``offset`` are of system memory only."""

    name: str
    nbytes: int
    key: str = ""
    offset: int = 0
    device_id: int = 0


@dataclass(eq=False, slots=True)
class RegisteredRegion:
    """One region. ``message`` makes it known to a worker; ``uses`` counts places that requests name."""

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
    """The owner of all regions of a front. Any client may register system shared memory of ``owners`` (uids);
    of other users, only the one that it belongs to.
    """

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
        #: The regions that each worker has been told of.
        self._introduced: dict[WorkerLink, set[int]] = {}
        self._opening: dict[int, tuple[WorkerLink, asyncio.Future[str]]] = {}

    def allow(self, owners: Iterable[int]) -> None:
        """Let the memory of these users be registered by any client from now on."""
        self._owners = frozenset(owners)

    # ---- registration ---------------------------------------------------------------------

    def register_system(
        self, name: str, key: str, offset: int, nbytes: int, client: int | None = None
    ) -> None:
        """Open ``nbytes`` from ``offset`` of ``key`` for the user ``client``; RequestError: it cannot be."""
        _check_new(name, RegionKind.SYSTEM, self._by_name)
        if offset < 0 or nbytes <= 0 or offset + nbytes > _MAX_UINT64 or offset % resource.getpagesize():
            raise InvalidArgument(
                f"failed to register shared memory region '{shown(name)}': invalid args, expected an offset "
                f"that is a multiple of {resource.getpagesize()} and at least one byte, got offset "
                f"{shown_dim(offset)} and {shown_dim(nbytes)} bytes"
            )
        try:
            fd = open_shared_memory(name, key, offset + nbytes, self._owners | {client})
        except SomebodyElses as error:
            self._refusals.say(
                _SOMEBODY_ELSES, shown(key), error.owner, "not known" if client is None else client
            )
            raise
        number = next(self._numbers)
        status = RegionStatus(name, nbytes, key, offset)
        region = RegisteredRegion(RegionKind.SYSTEM, number, status, wire.Region(number, offset, nbytes), fd)
        self._by_name[name] = self._by_number[number] = region
        region.enter(RegionLife.REGISTERED)

    async def register_cuda(self, name: str, raw_handle: bytes, device_id: int, nbytes: int) -> None:
        """Have a worker of the device open a ``cudaIpcMemHandle_t``; RequestError: it cannot be."""
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
        """Take the word of a worker that has opened a CUDA region, or says why it could not (``problem``)."""
        asked, answer = self._opening.get(number, (None, None))
        if answer is not None and asked is link and not answer.done():
            answer.set_result(problem)

    def status(self, kind: RegionKind, name: str = "") -> list[RegionStatus]:
        """The region of that name, or all of the kind; NotFound, InvalidArgument: none, or another kind."""
        if not name:
            return [one.status for one in self._listed(kind)]
        region = self._by_name.get(name)
        if region is None or region.life is RegionLife.OPENING:
            raise NotFound(f"Unable to find {kind.value.lower()} shared memory region: '{shown(name)}'")
        _check_kind(region, kind)
        return [region.status]

    def unregister(self, kind: RegionKind, name: str = "") -> None:
        """Let go of that region, or all of the kind, once unused; InvalidArgument: it is of another kind."""
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
        self._introduced.clear()

    # ---- use ------------------------------------------------------------------------------

    def pin(self, request: InferRequest) -> None:
        """Keep the regions that a request names until ``unpin``; none is kept where one cannot be."""
        regions = [self._containing(one) for one in request.regions]
        for one, region in zip(request.regions, regions, strict=True):
            one.number = region.number
            one.device = region.device
            region.uses += 1

    def pin_again(self, request: InferRequest) -> None:
        """Keep them for a part of a request that was pinned, whatever has become of their names since."""
        for one in request.regions:
            region = self._by_number.get(one.number)
            if region is not None:
                region.uses += 1

    def unpin(self, request: InferRequest) -> None:
        for one in request.regions:
            region = self._by_number.get(one.number)
            if region is not None:  # else the table was closed meanwhile
                region.uses -= 1
                if not region.uses:
                    self._drop_if_unused(region)

    def introduce(self, link: WorkerLink, numbers: Iterable[int]) -> None:
        """Make sure that a worker has been told of the regions of these numbers, which are in use."""
        known = self._introduced.get(link)
        if known is None:
            known = self._introduced[link] = set()
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
        self.introduce(link, (region.number,))
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
        for link, known in self._introduced.items():
            if region.number in known:
                known.discard(region.number)
                link.send(wire.DropRegion(region.number))

    def _remove(self, region: RegisteredRegion) -> None:
        del self._by_name[region.status.name]
        del self._by_number[region.number]
        region.close()

    def _forget(self, link: WorkerLink) -> None:
        """Forget what a worker was told that is gone, and end what waits for its word."""
        self._introduced.pop(link, None)
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
    if len(registered) >= _most_regions():
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


def _most_regions() -> int:
    """Each takes a descriptor, of which connections need most."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_REGIONS if soft == resource.RLIM_INFINITY else min(MAX_REGIONS, soft // 4)


def _check_cuda(name: str, raw_handle: bytes, device_id: int, nbytes: int) -> None:
    problem = ""
    if len(raw_handle) != HANDLE_NBYTES:
        given = f"got {len(raw_handle)}"
        problem = f"expected 'raw_handle' to be a cudaIpcMemHandle_t of {HANDLE_NBYTES} bytes, {given}"
    elif device_id < 0:
        problem = f"expected 'device_id' to be at least 0, got {shown_dim(device_id)}"
    elif not 0 < nbytes <= _MAX_UINT64:
        problem = f"expected 'byte_size' to be at least 1, got {shown_dim(nbytes)}"
    if problem:
        raise InvalidArgument(f"{_cuda_failure(name)}: invalid args, {problem}")


def _cuda_failure(name: str) -> str:
    return f"failed to register CUDA shared memory region: '{shown(name)}'"
