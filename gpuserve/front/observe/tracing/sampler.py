"""Which requests are traced: one in so many, and no more than so many. Pure; counts, knows no clock."""

from __future__ import annotations

import dataclasses

from gpuserve.front.observe.tracing.values import TraceLevel, TraceValues


class Sampler:
    """Chooses which requests of one scope of settings are traced."""

    __slots__ = ("_seen", "values")

    def __init__(self, values: TraceValues) -> None:
        self.values = values
        self._seen = 0

    @property
    def level(self) -> TraceLevel:
        return TraceLevel(self.values.level)

    def sample(self, forced: bool = False) -> bool:
        """Whether the next request is traced. ``forced``: its caller traces it, whatever the rate."""
        values = self.values
        if not values.level or not values.count or not values.rate:
            return False
        if not forced:
            self._seen += 1
            if self._seen % values.rate:
                return False
        if values.count > 0:
            self.values = dataclasses.replace(values, count=values.count - 1)
        return True
