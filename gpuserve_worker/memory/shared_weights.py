"""Weights that several workers share (``gpuserve.weights``). The first worker loads them and gives the
supervisor sealed memory with them. Other workers, and later processes of the same instances, map that memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from os import PathLike
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from gpuserve_worker.memory.weights_port import PORTS, WeightsPort, load_once

_Arguments = ParamSpec("_Arguments")
Loaded = TypeVar("Loaded")


class shared_weights:  # noqa: N801 - it reads as a function: with shared_weights("encoder") as weights
    """Weights that exist once for all instances of a server that name them alike::

        with shared_weights("encoder", files=["encoder.safetensors"]) as weights:
            model.load_state_dict(weights.load(load_file, "encoder.safetensors"), assign=True)

    The first instance loads them. Its arrays (numpy, and torch on the CPU) come to lie in sealed memory that
    the supervisor holds. Other instances, their restarts, and other models map that memory. If the loading
    instance dies, the next one loads. The memory is freed when the last instance that uses it has ended.

    Outside of a worker process (in tests, in worker threads) ``load`` only calls the function.

    Args:
        name: the name of the weights in the server.
        files: files or folders that the weights come from. If one of them changes, later loads are of a new
            version, while running instances keep theirs.
        version: any text that distinguishes versions which ``files`` do not.
        copy_on_write: whether arrays may be written. A written page is then the instance's own. Otherwise
            numpy raises ``ValueError``; torch has no read-only tensors, so its tensors on the CPU are always
            copy-on-write. With ``device`` each instance has a copy of its own there.
        device: a device such as "cuda:0" on which the torch tensors of the result lie, once for all
            instances on that device; a write to them ends the process. Where the device cannot share memory,
            each instance has a copy. A model with ``on_demand`` whose callable has no ``sleep`` and ``wake``
            gives the memory back while it sleeps. "cpu": the tensors stay on the host.

    Raises:
        OSError: one of ``files`` does not exist.
    """

    def __init__(
        self,
        name: str,
        *,
        files: Iterable[str | PathLike[str]] = (),
        version: str = "",
        copy_on_write: bool = False,
        device: str = "cpu",
    ) -> None:
        self._key = f"{name}\n{fingerprint(files, version)}"
        self._writable = copy_on_write
        self._device = device
        self._n_loads = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: arrays own their memory."""

    def load(
        self, load: Callable[_Arguments, Loaded], *args: _Arguments.args, **kwargs: _Arguments.kwargs
    ) -> Loaded:
        """Return what ``load(*args, **kwargs)`` returned in the instance that called it.

        Args:
            load: a function whose result can be pickled, such as a dict of arrays or a whole model.

        Raises:
            TypeError: ``device`` is given, and the result has no torch tensors.
            Exception: whatever ``load`` or the pickling of its result raises. The next instance then loads.
        """
        self._n_loads += 1
        key = self._key if self._n_loads == 1 else f"{self._key}\n{self._n_loads}"
        call = partial(load, *args, **kwargs)
        port = PORTS[0] if PORTS else None
        if self._device == "cpu":
            return call() if port is None else self._opened(port, key, call)
        from gpuserve_worker.memory import device_copies, device_weights  # most weights stay on the host

        space = None if port is None or self._writable else device_copies.space_of(self._device)
        if port is None or space is None:
            loaded = call() if port is None else self._opened(port, key, call)
            copied: Loaded = device_weights.on_device(loaded, self._device, remember=port is not None)
            return copied
        host = load_once(port, key, call) if port.may_sleep else None
        mapped: Loaded = device_weights.MappedWeights(port, space, self._device, key, host).open(call)
        return mapped

    def _opened(self, port: WeightsPort, key: str, load: Callable[[], Loaded]) -> Loaded:
        opened: Loaded = load_once(port, key, load).open(writable=self._writable)
        return opened


def fingerprint(files: Iterable[str | PathLike[str]], version: str = "") -> str:
    """Return a text that changes if a file, its size or its time of change does. The content is not read,
    because reading takes as long as loading. Raise ``OSError`` if a file does not exist.
    """
    import hashlib  # most workers share no weights

    digest = hashlib.blake2b(version.encode(), digest_size=16)
    for file in files:
        for path in _paths(os.path.realpath(file)):
            found = os.stat(path)
            digest.update(f"\0{path}\0{found.st_size}\0{found.st_mtime_ns}".encode())
    return digest.hexdigest()


def _paths(path: str) -> Iterator[str]:
    """Yield a file, or the files of a folder."""
    if not os.path.isdir(path):
        yield path
        return
    for folder, _, names in sorted(os.walk(path)):
        yield from (os.path.realpath(os.path.join(folder, name)) for name in sorted(names))
