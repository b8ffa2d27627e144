"""The time of one request whose tensors stay on the device (CUDA IPC), against the same request through the
host: tensors in shared memory of the host, and tensors in the message. One request under way; the model
answers its input. Then the bytes that the worker copies for them.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from benchmarks.figures import Goal
from benchmarks.gpu.running.section import Findings, SectionFailed, SectionSkipped, Site, ratio_figure
from benchmarks.gpu.served.client import (
    Caller,
    DeviceRegion,
    HostRegion,
    InRegion,
    answer_array,
    calling,
    device_region,
    host_region,
    in_regions,
    with_bytes,
)
from benchmarks.gpu.served.serving import Model, serving, tensor

_SIZES: Final = (64 << 10, 1 << 20, 16 << 20, 64 << 20, 256 << 20)
_MODEL: Final = "echo"
_WARM_UPS: Final = 2
#: What one round may take for each path.
_PART: Final = 0.4
_GOALS: Final = {(64 << 20, "message"): Goal(0.25)}
#: Requests whose copies are counted, and the size of their tensors.
_COUNTED: Final = 3
_COUNTED_NBYTES: Final = 64 << 20

Region = HostRegion | DeviceRegion


def run(site: Site, findings: Findings) -> None:
    findings.note("Median latency of one request at a time; the model answers the input it is given")
    with serving(site, "cuda-ipc", [_model()]) as one, calling(one) as caller:
        for nbytes in _SIZES:
            if nbytes <= site.effort.largest_nbytes:
                _measure(site, findings, caller, nbytes)
    _count(site, findings, min(_COUNTED_NBYTES, site.effort.largest_nbytes))


def _model() -> Model:
    x, y = tensor("x", "uint8", -1), tensor("y", "uint8", -1)
    return Model(_MODEL, "device_models.py:Echo", [x], [y], array="cupy")


# ---- latencies ----------------------------------------------------------------------------------


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
        #: The median latency of each path in each round, in ms.
        seen: dict[str, list[float]] = {name: [] for name in paths}
        for name, ask in list(paths.items()) * site.effort.rounds:
            times_s: list[float] = []
            ends_at = time.perf_counter() + site.effort.seconds * _PART
            while not times_s or time.perf_counter() < ends_at:
                times_s.append(ask())
            seen[name].append(median(times_s) * 1e3)
    ipc = seen.pop("CUDA IPC")
    for name, host in seen.items():
        case, details = f"{_size(nbytes)}, CUDA IPC / {name}", {"CUDA IPC, ms": ipc, "host, ms": host}
        findings.add(ratio_figure(case, "of the latency", ipc, host, _GOALS.get((nbytes, name)), **details))


# ---- bytes by the host --------------------------------------------------------------------------


def _count(site: Site, findings: Findings, nbytes: int) -> None:
    """The copies of the worker, by its own timeline, while tensors stay on the device. That it counts is
    seen with the same tensors in the message.
    """
    lines = site.folder / "counted.lines"
    data = np.random.default_rng(1).integers(0, 256, nbytes, np.uint8)
    with (
        serving(site, "counted", [_model()], {"GPUSERVE_CUDA_TIMELINE": str(lines)}) as one,
        calling(one) as caller,
        device_region(caller, nbytes) as given,
        device_region(caller, nbytes) as answered,
    ):
        ask = _through_regions(caller, (given, answered), data)
        for _ in range(_COUNTED):
            ask()
        by_ipc = _copied(lines)
        _through_message(caller, data)
        ask()  # a copy is written when the next one begins
        by_message = _copied(lines)
    requests = _COUNTED + _WARM_UPS
    findings.check(
        "no byte of a tensor in CUDA IPC memory passes the host",
        by_ipc["h2d"] + by_ipc["d2h"] == 0,
        f"{requests} requests of {_size(nbytes)} in and out: {by_ipc['h2d']} bytes copied to the device, "
        f"{by_ipc['d2h']} to the host, {by_ipc['d2d']} on the device",
    )
    findings.check(
        "tensors in a message are counted",
        min(by_message["h2d"], by_message["d2h"]) >= nbytes,
        f"one request of the same in the message: {by_message['h2d']} bytes copied to the device, "
        f"{by_message['d2h']} to the host",
    )


def _copied(lines: Path) -> Counter[str]:
    """Bytes by kind of copy, in the lines that workers have written so far."""
    found: Counter[str] = Counter()
    for file in lines.parent.glob(f"{lines.name}.*"):
        for one in map(json.loads, file.read_text().splitlines()):
            found[one["kind"]] += one["nbytes"]
    return found


# ---- requests -----------------------------------------------------------------------------------


def _through_regions(caller: Caller, pair: tuple[Region, ...], data: Any) -> Callable[[], float]:
    """How to make one request, timed. It is checked here once."""
    given, answered = pair
    shape = (data.nbytes,)
    message = in_regions(
        _MODEL, {"x": InRegion(given.name, shape, "uint8")}, {"y": InRegion(answered.name, shape, "uint8")}
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
