"""The metrics of a front on their way to a collector, every so many seconds, where the settings name one."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Final

from gpuserve.config.settings.server import ServerSettings
from gpuserve.front.observe.metrics_page import MetricsPage
from gpuserve.front.observe.metrics_push import MetricsPush, MetricsSender

#: What one page may take at most, and what the last one has when the front ends.
_SEND_TIMEOUT_S: Final = 10.0
_CLOSE_TIMEOUT_S: Final = 2.0


class MetricsPushing:
    """Gives the metrics page to a thread that sends it; ``close`` has the last one sent."""

    def __init__(self, page: MetricsPage, push: MetricsPush, period_s: float) -> None:
        self._page = page
        self._push = push
        self._period_s = period_s

    async def run(self) -> None:
        """Push until the front ends."""
        while True:
            await asyncio.sleep(self._period_s)
            self._push.put(await self._page.page())

    async def close(self) -> None:
        self._push.put(await self._page.page())
        await asyncio.to_thread(self._push.close, _CLOSE_TIMEOUT_S)


def metrics_pushing(page: MetricsPage, settings: ServerSettings) -> MetricsPushing | None:
    """What pushes a front's metrics, begun; None where they go nowhere."""
    if not settings.metrics_otlp_url:
        return None
    push = MetricsPush(partial(_sender, settings))
    push.open()
    return MetricsPushing(page, push, settings.metrics_otlp_period_s)


def _sender(settings: ServerSettings) -> MetricsSender:
    from gpuserve.front.observe.metrics_otlp import OtlpMetrics  # an extra, which only this needs

    timeout_s = min(_SEND_TIMEOUT_S, max(settings.metrics_otlp_period_s, 1.0))
    return OtlpMetrics(settings.metrics_otlp_url or "", settings.trace.resource, timeout_s)
