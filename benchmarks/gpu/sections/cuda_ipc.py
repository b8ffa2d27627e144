"""The time of one request whose tensors stay on the device (CUDA IPC), against the same request through the
host: tensors in shared memory of the host, and tensors in the message. One request under way; the model
answers its input.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.gpu.running.section import Findings, SectionFailed, SectionSkipped, Site, ratio_figure
from benchmarks.gpu.served.calls import Caller, calling
from benchmarks.gpu.served.client_memory import DeviceRegion, HostRegion, device_region, host_region
from benchmarks.gpu.served.messages import InRegion, answer_array, in_regions, with_bytes
from benchmarks.gpu.served.serving import Model, serving, tensor
from benchmarks.scenarios.figures import Figure

_SIZES: Final = (64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)
_MODEL: Final = "echo"
_WARM_UPS: Final = 2
#: What one round may take for each path.
_PART: Final = 0.4

Region = HostRegion | DeviceRegion


def run(site: Site, findings: Findings) -> None:
    """See ``section.py``."""
    findings.note("Median latency of one request at a time; the model answers the input it is given")
    x, y = tensor("x", "uint8", -1), tensor("y", "uint8", -1)
    model = Model(_MODEL, "device_models.py:Echo", [x], [y], array="cupy")
    with serving(site, "cuda-ipc", [model]) as one, calling(one) as caller:
        for nbytes in _SIZES:
            if nbytes <= site.effort.largest_nbytes:
                _measure(site, findings, caller, nbytes)


def _measure(site: Site, findings: Findings, caller: Caller, nbytes: int) -> None:
    paths: dict[str, Callable[[], float]] = {}
    with ExitStack() as stack:
        data = np.random.default_rng(nbytes).integers(0, 256, nbytes, np.uint8)
        pair = tuple(stack.enter_context(device_region(caller, nbytes)) for _ in range(2))
        paths["CUDA IPC"] = _through_regions(caller, pair, data)
        try:
            hosts = tuple(stack.enter_context(host_region(caller, nbytes)) for _ in range(2))
            paths["shared memory"] = _through_regions(caller, hosts, data)
        except SectionSkipped as skipped:
            findings.skip(f"{_size(nbytes)} in shared memory", str(skipped))
        paths["message"] = _through_message(caller, data)
        seen = _rounds(site, paths)
    findings.add(*_figures(nbytes, seen))


def _rounds(site: Site, paths: dict[str, Callable[[], float]]) -> dict[str, list[float]]:
    """The median latency of each path in each round, in ms."""
    seen: dict[str, list[float]] = {name: [] for name in paths}
    for _ in range(site.effort.rounds):
        for name, ask in paths.items():
            times_s: list[float] = []
            ends_at = time.perf_counter() + site.effort.seconds * _PART
            while not times_s or time.perf_counter() < ends_at:
                times_s.append(ask())
            seen[name].append(median(times_s) * 1e3)
    return seen


def _figures(nbytes: int, seen: dict[str, list[float]]) -> list[Figure]:
    ipc = seen.pop("CUDA IPC")
    return [
        ratio_figure(
            f"{_size(nbytes)}, {name} / CUDA IPC",
            "times the latency",
            host,
            ipc,
            None,
            **{"CUDA IPC, ms": ipc, "host, ms": host},
        )
        for name, host in seen.items()
    ]


def _through_regions(caller: Caller, pair: tuple[Region, ...], data: Any) -> Callable[[], float]:
    """How to make one request, timed. It is checked here once."""
    given, answered = pair
    shape = (data.nbytes,)
    message = in_regions(
        _MODEL,
        {"x": InRegion(given.name, shape, "uint8")},
        {"y": InRegion(answered.name, shape, "uint8")},
    )
    given.write(data)
    answered.write(~data)
    for _ in range(_WARM_UPS):
        caller.infer(message)
    if not np.array_equal(answered.read(data.nbytes), data):
        raise SectionFailed(f"the region of {_size(data.nbytes)} does not hold the answer")
    return lambda: _timed(caller, message)


def _through_message(caller: Caller, data: Any) -> Callable[[], float]:
    message = with_bytes(_MODEL, {"x": data})
    if not np.array_equal(answer_array(caller.infer(message), "y", "uint8"), data):
        raise SectionFailed(f"the message of {_size(data.nbytes)} does not hold the answer")
    return lambda: _timed(caller, message)


def _timed(caller: Caller, message: bytes) -> float:
    began_at = time.perf_counter()
    caller.infer(message)
    return time.perf_counter() - began_at


def _size(nbytes: int) -> str:
    return f"{nbytes >> 20} MiB" if nbytes >= 1 << 20 else f"{nbytes >> 10} KiB"
