"""The 64 bytes with which a process names its device memory or its event to another."""

from __future__ import annotations

import hashlib
import struct
from enum import Enum
from typing import Final

from cuda_simulation import errors, owners
from cuda_simulation.errors import CUDARuntimeError

NBYTES: Final = 64
_FIELDS: Final = struct.Struct("<4sIQQQ")
_CHECK_NBYTES: Final = NBYTES - _FIELDS.size


class Kind(Enum):
    """What a handle is of."""

    MEMORY = b"SimM"
    EVENT = b"SimE"


def handle(kind: Kind, name: owners.OwnedName, offset: int = 0) -> bytes:
    """The handle of what has that name, or of what lies at an offset in it."""
    fields = _FIELDS.pack(kind.value, name.owner.pid, name.owner.started, name.serial, offset)
    return fields + _check(fields)


def parse(kind: Kind, raw: bytes) -> tuple[owners.OwnedName, int]:
    """What a handle names, and the offset in it. Raises CUDARuntimeError: it is none, or of this process;
    and as cupy does for one that has not 64 bytes.
    """
    if not isinstance(raw, bytes):
        raise TypeError(f"Argument 'handle' has incorrect type (expected bytes, got {type(raw).__name__})")
    if len(raw) != NBYTES:
        word = "not enough" if len(raw) < NBYTES else "too many"
        raise IndexError(f"{word} values found during array assignment, expected {NBYTES}")
    fields = raw[: _FIELDS.size]
    magic, pid, started, serial, offset = _FIELDS.unpack(fields)
    if magic != kind.value or raw[_FIELDS.size :] != _check(fields):
        raise CUDARuntimeError(errors.INVALID_VALUE)
    name = owners.OwnedName(owners.Owner(pid, started), serial)
    if name.owner == owners.this_process():
        raise CUDARuntimeError(errors.DEVICE_UNINITIALIZED)
    return name, offset


def _check(fields: bytes) -> bytes:
    return hashlib.sha512(fields).digest()[:_CHECK_NBYTES]
