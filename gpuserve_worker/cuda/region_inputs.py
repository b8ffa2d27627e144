"""Inputs that lie in clients' regions of memory of the very device that they are for: copied within it, or
given to the callable as they are. No byte of them is on the host.
"""

from __future__ import annotations

from typing import Any, Final

from gpuserve_worker.cuda.device import Device
from gpuserve_worker.payloads import REGION, Place, WireFailure, WireTensor
from gpuserve_worker.regions import RegionError, Regions

#: Where a tensor has to begin to be used where it is: kernels may not take what is less aligned, and CUDA's
#: word for that ends the process.
_ALIGNMENT: Final = 256


def device_place(source: Any, regions: Regions) -> Place | None:
    """The place that a payload, as decoded, names in a region of device memory; None where it names none."""
    if not regions.any_on_device or isinstance(source, bytes) or len(source) < len(Place._fields):
        return None
    is_there = source[3] == REGION and regions.on_device(source[0]) is not None
    return Place(*source) if is_there else None


def in_place(device: Device, tensor: WireTensor, regions: Regions, kind: str) -> Any | None:
    """The array over an input that is all in one region, which stays open for as long as the array is there;
    None where a copy has to be made.

    Raises:
        ValueError: the place is not in its region.
    """
    place = device_place(tensor[3], regions)
    if place is None or not place.nbytes:
        return None
    region = regions.on_device(place.region)
    assert region is not None, "it was there a line above"
    address = region.address(place)
    if address % _ALIGNMENT:
        return None
    _, datatype, shape, _ = tensor
    memory = device.arrays.memory(address, place.nbytes, region.lease())
    return device.arrays.over(memory, 0, datatype, tuple(shape), kind)


def copy_part(
    device: Device, regions: Regions, place: Place, to: int, request: int | None
) -> WireFailure | None:
    """Begin to copy a place to an address of the device. A request whose rows cannot be had is refused, and
    its rows are zeros.

    Raises:
        CudaError: the device cannot be used any more.
        RegionError: they cannot be had, and are those of the whole batch.
    """
    region = regions.on_device(place.region)
    assert region is not None, "a place in device memory was looked for"
    try:
        region.begin_copy(place, to, device.h2d)
    except RegionError as error:
        if request is None:
            raise
        device.runtime.clear(to, place.nbytes, device.h2d)
        return WireFailure("INVALID_ARGUMENT", str(error))
    return None
