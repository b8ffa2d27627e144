"""Memory of other processes, opened in this one by its handle. A handle names a place in a block, and the
block is what is mapped: who has one place of it open has the others, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from cuda_simulation import errors, owners
from cuda_simulation.errors import CUDARuntimeError
from cuda_simulation.memory import AddressTable, Allocation, MemoryFiles, Origin
from cuda_simulation.visible import Device


@dataclass
class _Opened:
    """A block that is open, and how often each address in it was given."""

    whole: Allocation
    given: dict[int, int] = field(default_factory=dict)


class Imports:
    """What this process has open of others. ``known`` gives the device of a UUID."""

    def __init__(self, files: MemoryFiles, addresses: AddressTable, known: Callable[[str], Device]) -> None:
        self._files = files
        self._addresses = addresses
        self._known = known
        self._lock = threading.RLock()
        self._open: dict[str, _Opened] = {}

    def open(self, name: owners.OwnedName, offset: int, check: Callable[[Device], None]) -> int:
        """The address of a place in a block; the same one when it is open already. ``check`` is asked whether
        the block's device can be used. Raises CUDARuntimeError: its owner has given it up, or has ended.
        """
        with self._lock:
            opened = self._open.get(str(name)) or self._mapped(name)
            check(opened.whole.device)
            if str(name) not in self._open:
                self._addresses.put(opened.whole)
                self._open[str(name)] = opened
            address = opened.whole.address + offset
            opened.given[address] = opened.given.get(address, 0) + 1
            return address

    def close(self, address: int, settle: Callable[[], None]) -> None:
        """Give an address back. ``settle`` waits for what uses the block, before it goes with its last one.
        Raises CUDARuntimeError: the address was not given, or not so often.
        """
        with self._lock:
            opened = next((one for one in self._open.values() if address in one.given), None)
            if opened is None:
                raise CUDARuntimeError(errors.INVALID_VALUE)
            opened.given[address] -= 1
            if not opened.given[address]:
                del opened.given[address]
            if opened.given:
                return
            settle()
            del self._open[str(opened.whole.block.name)]
            self._addresses.remove(opened.whole)

    def _mapped(self, name: owners.OwnedName) -> _Opened:
        found = self._files.open(name)
        if found is None:
            raise CUDARuntimeError(errors.MAP_BUFFER_OBJECT_FAILED)
        uuid, content = found
        block = self._addresses.block(self._known(uuid), Origin.IMPORTED, name, content)
        return _Opened(Allocation(block.address, content.nbytes, block))
