"""Which handles of clients are open in a worker, and that each is closed once, at its end or at any error."""

from __future__ import annotations

import ctypes
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from exploring import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from present import present

from gpuserve_worker.cuda.copies.ipc_regions import CudaMemoryRegion, DeviceRegions
from gpuserve_worker.cuda.device.arrays import MemoryLease
from gpuserve_worker.cuda.device.device import CudaDevice
from gpuserve_worker.cuda.device.runtime import CudaError, Runtime
from gpuserve_worker.memory.client_regions import ClientRegions, RegionError
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

    ndarray = type("ndarray", (), {})

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

    def CUDARuntimeError(self, status: int) -> Refused:
        return Refused(status)

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> int:
        self.calls.append("cuIpcOpenMemHandle_v2")
        if "cuIpcOpenMemHandle_v2" in self.failures:
            return self.failures["cuIpcOpenMemHandle_v2"]
        at = bytes(handle)[0] * STEP
        self.open[at] += 1
        self.opened += 1
        ctypes.cast(address, ctypes.POINTER(ctypes.c_uint64))[0] = at
        return 0

    def cuIpcCloseMemHandle(self, address: Any) -> int:
        self.calls.append("cuIpcCloseMemHandle")
        self.open[address.value] -= 1
        return 0

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


class Regions:
    """Those of one front, and what was told of them. The thread that opens them has done what it is to do
    whenever the test looks.
    """

    def __init__(self) -> None:
        self.library = Library()
        runtime = Runtime(self.library, self.library, lambda _: 0)
        self.device = CudaDevice(runtime, 0, 11, 12, 0, 0, lambda _: None)
        self.faults: list[BaseException] = []
        self.table = DeviceRegions(self.device, ClientRegions(), self.faults.append)
        self.told: list[str] = []

    def open(self, nbytes: int, handle: bytes) -> CudaMemoryRegion:
        region = self.table.open(nbytes, handle, self.told.append)
        self.settle()
        return region

    def close(self, region: CudaMemoryRegion) -> None:
        region.close()
        self.settle()

    def hold(self) -> threading.Event:
        """Have the thread that opens handles wait for the event."""
        held = threading.Event()
        self.device.opened.thread.later(lambda: held.wait(10) and None)
        return held

    def settle(self) -> None:
        self.device.opened.thread.wait()


@pytest.fixture
def regions() -> Iterator[Regions]:
    made = Regions()
    yield made
    made.device.opened.close()


def handle(number: int) -> bytes:
    return bytes([number]) * 64


def test_one_handle_is_opened_once_and_closed_with_its_last_user(regions: Regions) -> None:
    library = regions.library
    opened = [regions.open(64, handle(1)) for _ in range(3)]
    other = regions.open(64, handle(2))
    assert (library.opened, library.count, regions.table.any_open) == (2, 2, True)
    assert regions.told == [""] * 4
    for region in opened[:2]:
        regions.close(region)
    assert library.open[STEP] == 1
    regions.close(opened[2])
    assert library.open[STEP] == 0
    regions.close(other)
    assert (library.count, regions.table.any_open) == (0, False)
    regions.open(64, handle(1))
    assert library.opened == 3


def test_a_handle_that_somebody_wants_again_is_closed_before_it_is_opened(regions: Regions) -> None:
    first = regions.open(64, handle(1))
    held = regions.hold()
    first.close()
    second = regions.table.open(64, handle(1), regions.told.append)
    held.set()
    regions.settle()
    assert (regions.library.opened, regions.library.open[STEP]) == (2, 1)
    calls = [one for one in regions.library.calls if "MemHandle" in one]
    assert calls == ["cuIpcOpenMemHandle_v2", "cuIpcCloseMemHandle", "cuIpcOpenMemHandle_v2"]
    assert second.address(Place(1, 0, 4)) == STEP
    regions.close(second)
    assert regions.library.count == 0


def test_who_needs_a_handle_waits_until_it_is_open(regions: Regions) -> None:
    held = regions.hold()
    region = regions.table.open(64, handle(1), regions.told.append)
    assert region.opening is not None
    assert (regions.table.any_opening, regions.told) == (True, [])
    found: list[int] = []
    waiting = threading.Thread(target=lambda: found.append(region.address(Place(1, 4, 4))))
    waiting.start()
    assert not found
    held.set()
    waiting.join(10)
    assert found == [STEP + 4]
    regions.settle()
    assert (region.opening, regions.table.any_opening, regions.told) == (None, False, [""])


def test_an_array_over_memory_keeps_it_open_and_the_device_is_waited_for(regions: Regions) -> None:
    library = regions.library
    region = regions.open(64, handle(1))
    lease: MemoryLease | None = region.lease()
    regions.close(region)
    assert library.count == 1
    library.calls.clear()
    assert lease is not None
    lease = None
    assert library.calls == [], "nothing of CUDA is called where an array happens to die"
    regions.close(regions.open(64, handle(2)))
    assert library.open[STEP] == 0
    assert library.calls.index("streamSynchronize") < library.calls.index("cuIpcCloseMemHandle")


def test_the_driver_is_given_the_handle_by_value() -> None:
    """By a function of C, of which ctypes knows as little as of the driver's."""

    class Handle(ctypes.Structure):
        _fields_ = (("reserved", ctypes.c_ubyte * 64),)

    seen: list[tuple[bytes, int]] = []
    kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint64), Handle, ctypes.c_uint)

    @kind
    def opened(address: Any, handle: Any, flags: int) -> int:
        seen.append((bytes(handle), flags))
        address[0] = 1 << 47
        return 0

    library = Library()
    at = present(ctypes.cast(opened, ctypes.c_void_p).value)
    library.cuIpcOpenMemHandle_v2 = ctypes.CFUNCTYPE(ctypes.c_int)(at)  # type: ignore[method-assign]
    given = bytes(range(192, 256))
    assert Runtime(library, library, lambda _: 0).open_memory(given) == 1 << 47
    assert seen == [(given, 1)]


@pytest.mark.parametrize("function", ["cuIpcOpenMemHandle_v2", "cuMemGetAddressRange_v2"])
@pytest.mark.parametrize("status", [INVALID_VALUE, OWN_PROCESS])
def test_whatever_cuda_refuses_leaves_nothing_open(regions: Regions, function: str, status: int) -> None:
    library = regions.library
    library.failures[function] = status
    region = regions.open(64, handle(1))
    (told,) = regions.told
    assert told.startswith("CUDA could not open its handle: ")
    assert ("PID namespace" in told) is (status == OWN_PROCESS)
    assert (library.count, regions.table.any_open) == (0, False)
    for _ in range(2):
        with pytest.raises(
            RegionError, match="a region of CUDA memory is not there: CUDA could not"
        ) as caught:
            region.address(Place(1, 0, 4))
        assert str(caught.value).endswith(told)
    library.failures.clear()
    regions.close(region)
    regions.close(regions.open(64, handle(1)))
    assert library.count == 0


def test_a_device_that_cannot_be_used_any_more_is_nothing_for_the_client(regions: Regions) -> None:
    failures = regions.library.failures
    failures["cuIpcOpenMemHandle_v2"] = failures["deviceSynchronize"] = ILLEGAL_ADDRESS
    region = regions.open(64, handle(1))
    assert regions.told == []
    (fault,) = regions.faults
    assert isinstance(fault, CudaError)
    with pytest.raises(CudaError):
        region.address(Place(1, 0, 4))


def test_memory_of_another_device_is_refused_and_closed(regions: Regions) -> None:
    regions.library.device_of[STEP] = 1
    regions.close(regions.open(64, handle(1)))
    regions.library.failures["pointerGetAttributes"] = INVALID_VALUE  # of one that this process does not see
    regions.close(regions.open(64, handle(1)))
    assert regions.told == ["its memory is on another device than the one given"] * 2
    assert (regions.library.count, regions.table.any_open) == (0, False)


def test_more_than_the_allocation_has_is_refused_also_where_it_is_open(regions: Regions) -> None:
    text = f"expected at most {NBYTES} bytes, which its allocation has, got {NBYTES + 1}"
    regions.close(regions.open(NBYTES + 1, handle(1)))
    assert regions.library.count == 0
    region = regions.open(NBYTES, handle(1))
    regions.close(regions.open(NBYTES + 1, handle(1)))
    assert regions.told == [text, "", text]
    assert regions.library.count == 1
    regions.close(region)
    assert regions.library.count == 0


def test_places_are_inside_of_the_region(regions: Regions) -> None:
    region = regions.open(64, handle(3))
    assert region.address(Place(1, 60, 4)) == 3 * STEP + 60
    for place in (Place(1, 61, 4), Place(1, -1, 4), Place(1, 0, 65), Place(1, 64, 1)):
        with pytest.raises(ValueError, match="of region 1"):
            region.address(place)


@given(
    st.lists(st.tuples(st.sampled_from(["open", "close", "lease", "die"]), st.integers(0, 3)), max_size=40)
)
@settings(max_examples=examples(200), deadline=None)
def test_what_is_open_is_what_somebody_refers_to(events: list[tuple[str, int]]) -> None:
    made = Regions()
    regions: list[tuple[int, CudaMemoryRegion]] = []
    leases: list[tuple[int, MemoryLease]] = []
    for event, number in events:
        if event == "open":
            regions.append((number, made.table.open(64, handle(number), made.told.append)))
        elif event == "close" and regions:
            regions.pop(number % len(regions))[1].close()
        elif event == "lease" and regions:
            of, region = regions[number % len(regions)]
            leases.append((of, region.lease()))
        elif event == "die" and leases:
            del leases[number % len(leases)]
    marker = made.open(64, handle(9))  # what has died is noticed by now
    used = {number for number, _ in (*regions, *leases)} | {9}
    assert {address // STEP for address, count in made.library.open.items() if count} == used
    assert all(count <= 1 for count in made.library.open.values())
    marker.close()
    made.device.opened.close()
