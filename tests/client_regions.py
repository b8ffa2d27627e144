"""Clients' regions of shared memory: made, registered and filled as tritonclient does it, for the tests.

No test is here, and no server.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tritonclient.grpc
import tritonclient.http
import tritonclient.utils.shared_memory as shm
from leaks import own_name
from numpy.typing import NDArray
from tritonclient.utils import serialize_byte_tensor


def library(client: Any) -> Any:
    return (
        tritonclient.grpc
        if isinstance(client, tritonclient.grpc.InferenceServerClient)
        else tritonclient.http
    )


def listed(client: Any) -> dict[str, tuple[str, int, int]]:
    """(key, offset, nbytes) of each region."""
    status = client.get_system_shared_memory_status()
    if isinstance(status, list):
        return {one["name"]: (one["key"], one["offset"], one["byte_size"]) for one in status}
    return {name: (one.key, one.offset, one.byte_size) for name, one in status.regions.items()}


@contextlib.contextmanager
def memory(nbytes: int, key: str | None = None) -> Iterator[tuple[Any, str]]:
    """A client's memory of this size, and its key."""
    key = key or f"/{own_name()}"
    handle = shm.create_shared_memory_region(key, key, nbytes)
    try:
        yield handle, key
    finally:
        shm.destroy_shared_memory_region(handle)


@contextlib.contextmanager
def region(client: Any, name: str, nbytes: int) -> Iterator[Any]:
    """Registered memory of this size."""
    with memory(nbytes) as (handle, key):
        client.register_system_shared_memory(name, key, nbytes)
        yield handle
        client.unregister_system_shared_memory(name)


def in_region(client: Any, array: NDArray[Any], datatype: str, nbytes: int, offset: int = 0) -> Any:
    made = library(client).InferInput("x", list(array.shape), datatype)
    made.set_shared_memory("in", nbytes, offset)
    return made


def into_region(client: Any, nbytes: int, offset: int = 0, name: str = "y") -> Any:
    made = library(client).InferRequestedOutput(name)
    made.set_shared_memory("out", nbytes, offset)
    return made


def raw(array: NDArray[Any]) -> bytes:
    """What a tensor is on the wire."""
    if array.dtype == object:
        packed: bytes = serialize_byte_tensor(array).item()
        return packed
    return array.tobytes()


def put(handle: Any, data: bytes, offset: int = 0) -> None:
    shm.set_shared_memory_region(handle, [np.frombuffer(data, dtype=np.uint8)], offset)


def got(handle: Any, nbytes: int, offset: int = 0) -> bytes:
    found: NDArray[np.uint8] = shm.get_contents_as_numpy(handle, np.uint8, [nbytes], offset)
    return found.tobytes()
