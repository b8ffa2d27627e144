"""Push of the metrics page to a collector, every few seconds if the settings name a collector."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, Protocol

from gpuserve.config.settings.server import ServerSettings

logger = logging.getLogger(__name__)

#: Timeouts of one page, and of the last page when the front ends.
_SEND_TIMEOUT_S: Final = 10.0
_CLOSE_TIMEOUT_S: Final = 2.0


class MetricsSender(Protocol):
    """A sender of metrics pages to a collector, used by one thread."""

    def send(self, page: bytes) -> None:
        """Send a page. Raise ``OSError`` with a reason if the collector did not accept it."""

    def close(self) -> None:
        """Close the connection. May be called while another thread sends."""


class MetricsPusher:
    """Sends the metrics page periodically, by a thread. Logs the first failure after each success."""

    def __init__(
        self,
        page: Callable[[], Awaitable[bytes]],
        make_sender: Callable[[], MetricsSender],
        period_s: float,
    ) -> None:
        self._page = page
        self._make_sender = make_sender
        self._period_s = period_s
        self._sender: MetricsSender | None = None
        self._is_failing = False
        self._thread = ThreadPoolExecutor(1, "gpuserve-metrics")

    async def run(self) -> None:
        """Push pages until the front ends."""
        while True:
            await asyncio.sleep(self._period_s)
            await self._push()

    async def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Push a last page, waiting at most ``timeout_s``."""
        await asyncio.wait([asyncio.ensure_future(self._push())], timeout=timeout_s)
        if self._sender is not None:
            self._sender.close()

    async def _push(self) -> None:
        page = await self._page()
        await asyncio.get_running_loop().run_in_executor(self._thread, self._send, page)

    def _send(self, page: bytes) -> None:
        try:
            if self._sender is None:
                self._sender = self._make_sender()
            self._sender.send(page)
        except OSError as error:
            if not self._is_failing:
                self._is_failing = True
                logger.warning("failed to send metrics to metrics_otlp_url, retrying: %s", error)
        except Exception:
            logger.exception("failed to send metrics: unexpected error")
        else:
            if self._is_failing:
                self._is_failing = False
                logger.info("metrics_otlp_url accepts metrics again")


def start_metrics_push(
    page: Callable[[], Awaitable[bytes]], settings: ServerSettings
) -> MetricsPusher | None:
    """Return the pusher of a front's metrics, or None if no collector is set."""
    if not settings.metrics_otlp_url:
        return None
    url, resource, period_s = (
        settings.metrics_otlp_url,
        settings.trace.resource,
        settings.metrics_otlp_period_s,
    )

    def sender() -> MetricsSender:
        from gpuserve.front.observability.otlp import (
            OtlpMetrics,
        )  # an optional dependency that only this needs

        return OtlpMetrics(url, resource, min(_SEND_TIMEOUT_S, max(period_s, 1.0)))

    return MetricsPusher(page, sender, period_s)
