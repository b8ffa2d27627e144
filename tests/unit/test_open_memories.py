"""Which handles of clients are open in a worker, and that each is closed once, at its end or at any error."""

from __future__ import annotations

import ctypes
from collections import Counter
from typing import Any

import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuserve_worker.cuda.copies.client_regions import (
    CudaMemoryRegion,
    DeviceRegions,
)
from gpuserve_worker.cuda.device.arrays import MemoryLease
from gpuserve_worker.cuda.device.device import CudaDevice
from gpuserve_worker.cuda.device.runtime import CudaError, Runtime
from gpuserve_worker.memory.regions import ClientRegions, RegionError
from gpuserve_worker.protocol.payloads import Place

#: CUDA's allocations lie as far apart here.
STEP = 1 << 20
NBYTES = 4096
INVALID_VALUE, OWN_PROCESS, ILLEGAL_ADDRESS = 1, 201, 700


class Refused(RuntimeError):
    """As cupy raises it."""

    def __init__(self, status: int) -> None:
        super().__init__(f"cudaError: {status}")
        self.status = status


class Library:
    """cupy and the driver, as far as they are needed: the handle of an allocation is its number."""

    def __init__(self) -> None:
        self.cuda = self
        self.runtime = self
        self.open: Counter[int] = Counter()
        self.opened = 0
        self.failures: dict[str, int] = {}
        self.device_of: dict[int, int] = {}
        self.calls: list[str] = []

    def _called(self, name: str) -> None:
        self.calls.append(name)
        if name in self.failures:
            raise Refused(self.failures[name])

    def setDevice(self, number: int) -> None:
        self._called("setDevice")

    def streamSynchronize(self, stream: int) -> None:
        self._called("streamSynchronize")

    def deviceSynchronize(self) -> None:
        self._called("deviceSynchronize")

    def ipcOpenMemHandle(self, handle: bytes) -> int:
        self._called("ipcOpenMemHandle")
        address = handle[0] * STEP
        self.open[address] += 1
        self.opened += 1
        return address

    def ipcCloseMemHandle(self, address: int) -> None:
        self._called("ipcCloseMemHandle")
        self.open[address] -= 1

    def pointerGetAttributes(self, address: int) -> Any:
        self._called("pointerGetAttributes")
        return type("PointerAttributes", (), {"device": self.device_of.get(address, 0)})

    def cuMemGetAddressRange_v2(self, base: Any, nbytes: Any, address: Any) -> int:
        self.calls.append("cuMemGetAddressRange_v2")
        ctypes.cast(base, ctypes.POINTER(ctypes.c_uint64))[0] = address.value - 512
        ctypes.cast(nbytes, ctypes.POINTER(ctypes.c_size_t))[0] = NBYTES + 512
        return self.failures.get("cuMemGetAddressRange_v2", 0)

    @property
    def count(self) -> int:
        return sum(self.open.values())


def memories() -> tuple[Library, DeviceRegions]:
    library = Library()
    device = CudaDevice(Runtime(library, library), 0, 11, 12, 0, lambda _: None)
    return library, DeviceRegions(device, ClientRegions())


def handle(number: int) -> bytes:
    return bytes([number]) * 64


def test_one_handle_is_opened_once_and_closed_with_its_last_user() -> None:
    library, table = memories()
    regions = [table.open(64, handle(1)) for _ in range(3)]
    other = table.open(64, handle(2))
    assert (library.opened, library.count, table.any_open) == (2, 2, True)
    for region in regions[:2]:
        region.close()
    assert library.open[STEP] == 1
    regions[2].close()
    assert library.open[STEP] == 0
    other.close()
    assert (library.count, table.any_open) == (0, False)
    table.open(64, handle(1))
    assert library.opened == 3


def test_an_array_over_memory_keeps_it_open_and_the_device_is_waited_for() -> None:
    library, table = memories()
    region = table.open(64, handle(1))
    lease: MemoryLease | None = region.lease()
    region.close()
    assert library.count == 1
    library.calls.clear()
    assert lease is not None
    lease = None
    assert library.calls == [], "nothing of CUDA is called where an array happens to die"
    table.open(64, handle(2)).close()
    assert library.open[STEP] == 0
    assert library.calls.index("streamSynchronize") < library.calls.index("ipcCloseMemHandle")


@pytest.mark.parametrize("function", ["ipcOpenMemHandle", "cuMemGetAddressRange_v2"])
@pytest.mark.parametrize("status", [INVALID_VALUE, OWN_PROCESS])
def test_whatever_cuda_refuses_leaves_nothing_open(function: str, status: int) -> None:
    library, table = memories()
    library.failures[function] = status
    with pytest.raises(RegionError, match="CUDA could not open its handle: ") as caught:
        table.open(64, handle(1))
    assert ("PID namespace" in str(caught.value)) is (status == OWN_PROCESS)
    assert (library.count, table.any_open) == (0, False)
    library.failures.clear()
    table.open(64, handle(1)).close()
    assert library.count == 0


def test_a_device_that_cannot_be_used_any_more_is_nothing_for_the_client() -> None:
    library, table = memories()
    library.failures["ipcOpenMemHandle"] = library.failures["deviceSynchronize"] = ILLEGAL_ADDRESS
    with pytest.raises(CudaError):
        table.open(64, handle(1))


def test_memory_of_another_device_is_refused_and_closed() -> None:
    library, table = memories()
    library.device_of[STEP] = 1
    with pytest.raises(RegionError, match="on another device"):
        table.open(64, handle(1))
    library.failures["pointerGetAttributes"] = INVALID_VALUE  # of one that this process does not see
    with pytest.raises(RegionError, match="on another device"):
        table.open(64, handle(1))
    assert (library.count, table.any_open) == (0, False)


def test_more_than_the_allocation_has_is_refused_also_where_it_is_open() -> None:
    library, table = memories()
    text = f"expected at most {NBYTES} bytes, which its allocation has, got {NBYTES + 1}"
    with pytest.raises(RegionError, match=text):
        table.open(NBYTES + 1, handle(1))
    assert library.count == 0
    region = table.open(NBYTES, handle(1))
    with pytest.raises(RegionError, match=text):
        table.open(NBYTES + 1, handle(1))
    assert library.count == 1
    region.close()
    assert library.count == 0


def test_places_are_inside_of_the_region() -> None:
    _, table = memories()
    region = table.open(64, handle(3))
    assert region.address(Place(1, 60, 4)) == 3 * STEP + 60
    for place in (Place(1, 61, 4), Place(1, -1, 4), Place(1, 0, 65), Place(1, 64, 1)):
        with pytest.raises(ValueError, match="of region 1"):
            region.address(place)


@given(
    st.lists(st.tuples(st.sampled_from(["open", "close", "lease", "die"]), st.integers(0, 3)), max_size=40)
)
@settings(max_examples=examples(200), deadline=None)
def test_what_is_open_is_what_somebody_refers_to(events: list[tuple[str, int]]) -> None:
    library, table = memories()
    regions: list[tuple[int, CudaMemoryRegion]] = []
    leases: list[tuple[int, MemoryLease]] = []
    for event, number in events:
        if event == "open":
            regions.append((number, table.open(64, handle(number))))
        elif event == "close" and regions:
            regions.pop(number % len(regions))[1].close()
        elif event == "lease" and regions:
            of, region = regions[number % len(regions)]
            leases.append((of, region.lease()))
        elif event == "die" and leases:
            del leases[number % len(leases)]
    marker = table.open(64, handle(9))  # what has died is noticed by now
    used = {number for number, _ in (*regions, *leases)} | {9}
    assert {address // STEP for address, count in library.open.items() if count} == used
    assert all(count <= 1 for count in library.open.values())
    marker.close()
