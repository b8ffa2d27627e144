"""Outputs on their way into clients' regions of device memory: within the device where they are there, from
page-locked memory otherwise. All copies are on the stream of outputs; nothing waits for them here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpuserve_worker.cuda.client_regions import ClientRegion
from gpuserve_worker.cuda.device import Device
from gpuserve_worker.cuda.pins import address_of
from gpuserve_worker.cuda.runtime import Copy
from gpuserve_worker.memory import Block
from gpuserve_worker.output_writer import fill
from gpuserve_worker.outputs import Answers, Output
from gpuserve_worker.payloads import Place, WireRequest, requests_as_tuples
from gpuserve_worker.regions import Regions


def meets_device_regions(answers: Answers, requests: Sequence[WireRequest | int], regions: Regions) -> bool:
    """Whether an answer goes into such a region, or the callable was given the memory of one: then the work
    of the device has to be over before anything is sent.
    """
    if not regions.any_on_device:
        return False
    numbers = [place.region for place in answers.sources]
    numbers += [place[0] for one in requests_as_tuples(requests) for _, place in one[3]]
    return any(regions.on_device(number) is not None for number in numbers)


def begin_to_region(
    device: Device, region: ClientRegion, output: Output, place: Place, new_block: Callable[[], Block]
) -> Block | None:
    """Begin to copy an output to a place of its size. The block from which a part of it comes, if any does,
    is to be kept until the copies are over.

    Raises:
        OutOfMemory: there is no block.
        RegionError, CudaError: as ``ClientRegion.write``.
    """
    array = device.runtime.cupy.ndarray
    if not any(isinstance(part, array) for part in output.parts):
        block = new_block()
        fill(block.view, output)
        region.begin_write(place, address_of(block.view), Copy.HOST_TO_DEVICE, device.d2h)
        return block
    kept: Block | None = None
    position = 0
    for part in output.parts:
        nbytes = part.size * output.dtype.itemsize
        at = place._replace(offset=place.offset + position, nbytes=nbytes)
        if isinstance(part, array):
            region.begin_write(at, part.data.ptr, Copy.DEVICE_TO_DEVICE, device.d2h)
        elif nbytes:
            kept = kept or new_block()
            source = _put(part, output.dtype, kept.view[position : position + nbytes])
            region.begin_write(at, source, Copy.HOST_TO_DEVICE, device.d2h)
        position += nbytes
    return kept


def _put(part: Any, dtype: np.dtype[Any], target: memoryview) -> int:
    """Copy a part that is on the host, cast as it goes; where it is then."""
    with np.errstate(all="ignore"):  # a NaN cast to an integer is the callable's business
        np.copyto(np.ndarray(part.shape, dtype, target), part, casting="unsafe")
    return address_of(target)
