"""Opening the file behind a region of system shared memory. It is never mapped nor read here: whoever made it
may shrink it at any time.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Container
from typing import Final

from gpuserve.core.errors import InvalidArgument, NotFound, ResourceExhausted
from gpuserve.front.requests.limits import shown

#: Triton's own, in case one runs on this machine: its workers believe what they read there.
_RESERVED_PREFIX: Final = "triton_python_backend_shm_region_"
_MAX_NAME_NBYTES: Final = 255
_FLAGS: Final = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY


class SomebodyElses(NotFound):
    """The memory belongs to ``owner`` (uid), who is not one of those that it may belong to."""

    def __init__(self, key: str, owner: int) -> None:
        super().__init__(_not_there(key))
        self.owner = owner


def open_shared_memory(region: str, key: str, end: int, owners: Container[int | None]) -> int:
    """A descriptor, the caller's, of the POSIX shared memory ``key``, at least ``end`` bytes long.
    InvalidArgument: the key or size cannot be; NotFound, ``SomebodyElses``: it is not to be had;
    ResourceExhausted: no descriptor is left.
    """
    path = f"/dev/shm/{_file_name(region, key)}"
    try:
        fd = os.open(path, _FLAGS)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise NotFound(_not_there(key)) from None
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
    """What ``shm_open`` makes of a key: slashes in front do not count, and there may be none further on."""
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
        raise NotFound(_not_there(key))
    if found.st_uid not in owners:
        raise SomebodyElses(key, found.st_uid)
    if end > found.st_size:
        raise InvalidArgument(
            f"failed to register shared memory region '{shown(region)}': invalid args, expected offset and "
            f"byte size to lie in the {found.st_size} bytes of '{shown(key)}', got an end at {end}"
        )


def _not_there(key: str) -> str:
    return f"Unable to open shared memory region: '{shown(key)}'"
