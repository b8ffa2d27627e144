"""Memory of a library on the CPU that stands for memory of the device, for as long as an object lives."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from cuda_simulation import owners
from cuda_simulation.context import current
from cuda_simulation.memory import Allocation, Origin


class Adopted:
    """The ``nbytes`` of an array on the host at ``address``; its first element is at ``offset``. Whoever uses
    the address later than this object lives uses memory that is not there.
    """

    def __init__(self, host: np.ndarray[Any, Any]) -> None:
        low, high = np.lib.array_utils.byte_bounds(host)
        self.nbytes = high - low
        self.offset = host.ctypes.data - low
        self._host = host
        self._addresses = current().addresses
        self._allocation: Allocation | None = None
        known = self._addresses.of_content(low)
        if known is not None:  # a tensor over memory that the device has
            self.address = known
            return
        content = np.frombuffer((ctypes.c_uint8 * self.nbytes).from_address(low), np.uint8)
        block = self._addresses.block(current().device, Origin.POOL, owners.new_name(), content)
        self._allocation = self._addresses.put(Allocation(block.address, self.nbytes, block))
        self.address = block.address

    def __del__(self) -> None:
        if self._allocation is not None:
            self._addresses.remove(self._allocation)
