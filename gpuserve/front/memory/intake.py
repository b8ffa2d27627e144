"""What the bodies of requests take of the memory of the front. A tensor takes pages of its model's arena as
its bytes come: claims cost nothing. The rest lies on the heap, in one account for all connections.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import Final

from gpuserve.core.errors import NoMemory
from gpuserve_worker.memory.arena import SHARE_OF_FREE, SPARED_NBYTES, Block, OutOfMemory
from gpuserve_worker.memory.available import available_nbytes
from gpuserve_worker.memory.orphans import INTAKE_SHARE, ORPHANS

logger = logging.getLogger(__name__)

#: So much of a block is reserved at most beyond what has come: the loop clears it in a few milliseconds.
AHEAD_NBYTES: Final = 2 << 20
#: What the objects of a request take whose body comes in parts, and of one that a coroutine serves.
REQUEST_NBYTES: Final = 1 << 10
AWAITED_NBYTES: Final = 4 << 10
#: How far the account grows until the machine is asked again what it has left.
_LOOK_NBYTES: Final = 8 << 20
_TELL_PERIOD_S: Final = 10.0


class Intake:
    """The account of what lies on the heap. ``refused`` counts the requests that found no memory."""

    def __init__(
        self, limit_nbytes: int, available_nbytes: Callable[[], int | None] = available_nbytes
    ) -> None:
        self.limit_nbytes = limit_nbytes
        self.nbytes = 0
        #: Whether who can wait should, before more is read.
        self.is_crowded = False
        self.refused = 0
        self._by_source: dict[str | bytes, int] = {}
        self._available_nbytes = available_nbytes
        self._allowed_nbytes = 0
        self._told_at = -math.inf

    def change(self, nbytes: int, source: str | bytes = "") -> None:
        """Count so many bytes more, or fewer, of who comes from there ("": nobody knows). Raises NoMemory:
        there is no room for them.
        """
        total = self.nbytes + nbytes
        of_source = nbytes if source else 0
        if source in self._by_source:
            of_source += self._by_source[source]
        if nbytes <= 0:
            self._allowed_nbytes = min(self._allowed_nbytes, total + _LOOK_NBYTES)
        elif total > self.limit_nbytes:
            raise self.refusal(
                f"the bodies of requests under way hold {self.nbytes} bytes, expected at most "
                f"{self.limit_nbytes} with {nbytes} more (max_intake_nbytes)"
            )
        elif of_source > SHARE_OF_FREE * (self.limit_nbytes - total):
            raise self.refusal(
                f"the bodies of requests from this address hold {of_source - nbytes} bytes, expected at most "
                f"{SHARE_OF_FREE} times what of {self.limit_nbytes} is free with {nbytes} more "
                "(max_intake_nbytes)"
            )
        elif total > self._allowed_nbytes:
            left = self._available_nbytes()
            # What bodies hold will take as much again: when they are read, for batches, and for answers.
            needed_nbytes = nbytes + _LOOK_NBYTES + max(SPARED_NBYTES, total)
            if left is not None and left < needed_nbytes:
                raise self.refusal(
                    f"its machine or control group has {left} bytes left, and {needed_nbytes} are needed"
                )
            self._allowed_nbytes = total + _LOOK_NBYTES
        self.nbytes = total
        if of_source:
            self._by_source[source] = of_source
        elif source in self._by_source:
            del self._by_source[source]
        self.is_crowded = 2 * total > self.limit_nbytes

    def refusal(self, why: str) -> NoMemory:
        """The error of a request for which there is no memory, which is counted, and logged now and then."""
        self.refused += 1
        if time.monotonic() - self._told_at >= _TELL_PERIOD_S:
            self._told_at = time.monotonic()
            logger.warning("requests are refused for want of memory, %d so far: %s", self.refused, why)
        return NoMemory(f"the server has no memory for the request now: {why}")


class Share:
    """What one request holds of an intake. Whoever makes it holds nothing any more in the end. While it holds
    anything, ``objects_nbytes`` are counted besides.
    """

    __slots__ = ("_intake", "_objects_nbytes", "_source", "nbytes")

    memory_kind = INTAKE_SHARE

    def __init__(self, intake: Intake, source: str | bytes = "", objects_nbytes: int = 0) -> None:
        self._intake = intake
        self._source = source
        self._objects_nbytes = objects_nbytes
        self.nbytes = 0

    def __del__(self) -> None:
        if self.nbytes:
            ORPHANS.add(self)

    def reclaim(self) -> None:
        self.hold(0)

    def hold(self, nbytes: int) -> None:
        """Hold so many bytes from now on. Raises NoMemory: they are too many, and all is as it was."""
        held_nbytes = self.nbytes
        if nbytes != held_nbytes:
            more = nbytes - held_nbytes
            if not (nbytes and held_nbytes):
                more += self._objects_nbytes if nbytes else -self._objects_nbytes
            self._intake.change(more, self._source)
            self.nbytes = nbytes

    def reserve(self, block: Block, nbytes: int) -> int:
        """Have the first so many bytes of a claimed block ready; how many are. Raises NoMemory."""
        try:
            return block.reserve(min(block.nbytes, nbytes + min(nbytes, AHEAD_NBYTES)), self._source)
        except OutOfMemory as error:
            raise self._intake.refusal(str(error)) from error
