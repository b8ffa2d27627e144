"""The moments that a batch passes. Those of work on a device are told by ``cuda/device_stopwatch.py``."""

from __future__ import annotations

from time import perf_counter_ns


class Stopwatch:
    """The moments (ns) that a batch passed: it came, the callable was called, the callable returned."""

    __slots__ = ("called_ns", "received_ns", "returned_ns")

    def __init__(self) -> None:
        self.received_ns = self.called_ns = self.returned_ns = perf_counter_ns()

    def staged(self) -> None:
        """The inputs are on their way to a device."""

    def called(self) -> None:
        """The callable is called now."""
        self.called_ns = self.returned_ns = perf_counter_ns()

    def returned(self) -> None:
        """The callable has given all of its answer."""
        self.returned_ns = perf_counter_ns()

    def leaving(self) -> None:
        """The outputs are on their way from a device."""

    def has_computed(self) -> bool:
        """Whether a device is done with what the callable started."""
        return True

    def wait_computed(self) -> None:
        """Wait until it is."""

    def phases(self) -> tuple[int, int, int]:
        """Nanoseconds before, in, and after the callable until now."""
        return (
            self.called_ns - self.received_ns,
            self.returned_ns - self.called_ns,
            perf_counter_ns() - self.returned_ns,
        )
