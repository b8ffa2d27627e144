"""Push of the metrics page to a collector, every few seconds if the settings name a collector.

A thread sends one page at a time. Meanwhile a newer page replaces the queued one: nothing accumulates.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from gpuserve.config.settings.server import ServerSettings
from gpuserve.front.observability.metrics.metrics_page import MetricsPage

logger = logging.getLogger(__name__)


class MetricsSender(Protocol):
    """A sender of metrics pages to a collector, used by one thread."""

    def send(self, page: bytes) -> None:
        """Send a page. Raise ``OSError`` with a reason if the collector did not accept it."""

    def close(self) -> None:
        """Close the connection. May be called while another thread sends."""


class MetricsPush:
    """A queue of one page and its sending thread, which creates the sender. ``put`` never blocks. A failure
    is logged once, and again after a success.
    """

    def __init__(self, make_sender: Callable[[], MetricsSender]) -> None:
        self._make_sender = make_sender
        self._page: bytes | None = None
        self._ended = False
        self._is_failing = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="gpuserve-metrics", daemon=True)

    def open(self) -> None:
        self._thread.start()

    def put(self, page: bytes) -> None:
        with self._changed:
            self._page = page
            self._changed.notify()

    def close(self, timeout_s: float) -> None:
        """Send the queued page, waiting at most ``timeout_s``."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        sender = self._make_sender()
        while (page := self._dequeue()) is not None:
            try:
                sender.send(page)
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
        sender.close()

    def _dequeue(self) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: self._page is not None or self._ended)
            page, self._page = self._page, None
            return page


# ---- periodic push -------------------------------------------------------------------------------

#: Timeouts of one page, and of the last page when the front ends.
_SEND_TIMEOUT_S: Final = 10.0
_CLOSE_TIMEOUT_S: Final = 2.0


class MetricsPusher:
    """Renders the metrics page periodically for a thread that sends it; ``close`` sends a last page."""

    def __init__(self, page: MetricsPage, push: MetricsPush, period_s: float) -> None:
        self._page = page
        self._push = push
        self._period_s = period_s

    async def run(self) -> None:
        """Push pages until the front ends."""
        while True:
            await asyncio.sleep(self._period_s)
            self._push.put(await self._page.page())

    async def close(self) -> None:
        self._push.put(await self._page.page())
        await asyncio.to_thread(self._push.close, _CLOSE_TIMEOUT_S)


def start_metrics_push(page: MetricsPage, settings: ServerSettings) -> MetricsPusher | None:
    """Start pushing a front's metrics, and return the pusher, or None if no collector is set."""
    if not settings.metrics_otlp_url:
        return None
    push = MetricsPush(partial(_sender, settings))
    push.open()
    return MetricsPusher(page, push, settings.metrics_otlp_period_s)


def _sender(settings: ServerSettings) -> MetricsSender:
    from gpuserve.front.observability.otlp import OtlpMetrics  # an optional dependency that only this needs

    timeout_s = min(_SEND_TIMEOUT_S, max(settings.metrics_otlp_period_s, 1.0))
    return OtlpMetrics(settings.metrics_otlp_url or "", settings.trace.resource, timeout_s)
