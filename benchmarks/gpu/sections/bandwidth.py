"""Bytes a second between host and device: by the worker's own code, as it brings inputs from the front's
arena and takes outputs to its own, against ``cudaMemcpyAsync`` from and to page-locked memory of CUDA's. In
turns, in one process, two batches under way in both.
"""

from __future__ import annotations

import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final

import numpy as np

from benchmarks.figures import Figure, Goal
from benchmarks.gpu.running.section import Findings, Site, ratio_figure
from gpuserve_worker.cuda.copies.cuda_session import CudaSession, StagedInputs, Staging
from gpuserve_worker.cuda.copies.output_copies import CudaOutputCopies
from gpuserve_worker.cuda.cuda_path import CudaPath
from gpuserve_worker.cuda.device.device import CudaDevice, open_device
from gpuserve_worker.cuda.device.runtime import Copy
from gpuserve_worker.execution.session import FrontSession
from gpuserve_worker.inference.outputs import BatchAnswers, CheckedOutput
from gpuserve_worker.memory.arena import Arena
from gpuserve_worker.protocol.link import Link
from gpuserve_worker.protocol.payloads import Ref, WireTensor

_SIZES: Final = (1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20)
#: From here on a copy is long against what begins it; below there is no goal.
_GOAL_FROM: Final = 16 << 20
_GOAL: Final = Goal(0.95, at_least=True)
_UNDER_WAY: Final = 2
_PART: Final = 0.5  #: of the seconds of a run, for each side

#: The other ends of links: closed, they would end the sessions.
_KEPT: list[Any] = []

#: So many copies, one after the other; all are over when it returns.
Mover = Callable[[int], None]


def run(site: Site, findings: Findings) -> None:
    findings.note("From 16 MiB on there is a goal; below, the beginning of a copy is a part of what it takes")
    device = open_device(warn=findings.note)
    for nbytes in _SIZES:
        if nbytes > site.effort.largest_nbytes:
            break
        bringing, taking = _Bringing(device, nbytes), _Taking(device, nbytes)
        for move in (bringing.move, taking.move):
            move(_UNDER_WAY)
        device.host.wait()  # segments are locked in the background
        to_device = _RawCopy(device, nbytes, Copy.HOST_TO_DEVICE)
        to_host = _RawCopy(device, nbytes, Copy.DEVICE_TO_HOST)
        findings.add(
            _compared(site, f"{nbytes >> 20} MiB to the device", nbytes, bringing.move, to_device.move),
            _compared(site, f"{nbytes >> 20} MiB to the host", nbytes, taking.move, to_host.move),
        )


def _compared(site: Site, case: str, nbytes: int, ours: Mover, raw: Mover) -> Figure:
    count = _count(raw, site.effort.seconds * _PART)
    ours(_UNDER_WAY)
    worker, bare = [], []
    for _ in range(site.effort.rounds):
        worker.append(_gigabytes_per_s(ours, count, nbytes))
        bare.append(_gigabytes_per_s(raw, count, nbytes))
    goal = _GOAL if nbytes >= _GOAL_FROM else None
    details = {"worker, GB/s": worker, "cudaMemcpyAsync, GB/s": bare}
    return ratio_figure(case, "worker / cudaMemcpyAsync", worker, bare, goal, **details)


def _count(move: Mover, seconds: float) -> int:
    """How many fill so many seconds; warms up as well."""
    move(_UNDER_WAY)
    began_at = time.perf_counter()
    move(_UNDER_WAY)
    each_s = (time.perf_counter() - began_at) / _UNDER_WAY
    return max(_UNDER_WAY, min(2000, int(seconds / each_s)))


def _gigabytes_per_s(move: Mover, count: int, nbytes: int) -> float:
    began_at = time.perf_counter()
    move(count)
    return count * nbytes / (time.perf_counter() - began_at) / 1e9


class _RawCopy:
    """``cudaMemcpyAsync`` between memory of the device and page-locked memory of CUDA's, two of each."""

    def __init__(self, device: CudaDevice, nbytes: int, kind: Copy) -> None:
        cupy = device.runtime.cupy
        self._runtime, self._nbytes, self._kind = device.runtime, nbytes, kind
        self._stream = device.runtime.create_stream()
        host = [cupy.cuda.alloc_pinned_memory(nbytes) for _ in range(_UNDER_WAY)]
        on_device = [cupy.cuda.alloc(nbytes) for _ in range(_UNDER_WAY)]
        self._kept = host, on_device
        pairs = [(one.ptr, other.ptr) for one, other in zip(on_device, host, strict=True)]
        self._pairs = pairs if kind is Copy.HOST_TO_DEVICE else [(to, source) for source, to in pairs]

    def move(self, count: int) -> None:
        for index in range(count):
            to, source = self._pairs[index % _UNDER_WAY]
            self._runtime.copy(to, source, self._nbytes, self._kind, self._stream)
        self._runtime.synchronize_stream(self._stream)


class _Bringing:
    """Inputs from an arena, as the front has it, to the device, as the worker brings them."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self._session = _session(device)
        self._arena = Arena(1 << 40, self._session.front.mapping.attach, lambda _segment: None)
        self._staging = Staging(device, frozenset({"x"}), "cupy")
        self._blocks = [self._arena.allocate(nbytes) for _ in range(_UNDER_WAY)]
        self._nbytes = nbytes

    def move(self, count: int) -> None:
        under_way: deque[tuple[Any, StagedInputs]] = deque()
        for index in range(count):
            block = self._blocks[index % _UNDER_WAY]
            payload = Ref(block.segment, block.offset, self._nbytes)
            tensors = [WireTensor("x", "UINT8", (self._nbytes,), payload)]
            under_way.append(self._staging.start_transfer(self._session, tensors, {}))
            if len(under_way) > _UNDER_WAY:
                under_way.popleft()[1].wait_idle()
        while under_way:
            under_way.popleft()[1].wait_idle()


class _Taking:
    """Outputs of a callable to the worker's arena, as the worker takes them."""

    def __init__(self, device: CudaDevice, nbytes: int) -> None:
        self._session = _session(device)
        cupy = device.runtime.cupy
        self._outputs = [
            CheckedOutput("y", "UINT8", (nbytes,), nbytes, np.dtype(np.uint8), [cupy.zeros(nbytes, np.uint8)])
            for _ in range(_UNDER_WAY)
        ]

    def move(self, count: int) -> None:
        under_way: deque[CudaOutputCopies] = deque()
        for index in range(count):
            answers = BatchAnswers([self._outputs[index % _UNDER_WAY]], None)
            under_way.append(self._session.start_output_copies(answers, ()))
            if len(under_way) > _UNDER_WAY:
                self._end(under_way.popleft())
        while under_way:
            self._end(under_way.popleft())

    def _end(self, copies: CudaOutputCopies) -> None:
        """Wait for it, and say as the front does that it has been read."""
        written: Any = copies.wait().outputs
        self._session.writer.free([(one.payload.segment, one.payload.offset) for one in written])


def _session(device: CudaDevice) -> CudaSession:
    """What a worker shares with a front; nobody reads the other end of the link."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _KEPT.append(theirs)
    staging = Staging(device, frozenset({"x"}), "cupy")
    session = FrontSession(Link(ours), CudaPath(device, staging), _raised, read_only_inputs=False)
    assert isinstance(session.device, CudaSession)
    _KEPT.append(session)
    return session.device


def _raised(error: BaseException) -> None:
    raise error
