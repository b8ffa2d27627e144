"""The way of metrics to a collector: a thread that sends pages, one at a time. While it sends, or waits for a
collector that says nothing, newer pages take the place of the one that waits: nobody is held up, and nothing
piles up. What a page becomes on the wire is ``metrics_otlp.py``'s.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)


class MetricsSender(Protocol):
    """Sends one page of metrics at a time to a collector, in the thread that calls it."""

    def send(self, page: bytes) -> None:
        """Send what a page says; ``OSError``, whose text says why, where it was not taken."""

    def close(self) -> None:
        """Let go of the connection; may be called while another thread sends."""


class MetricsPush:
    """Takes pages in any thread, and never blocks. The sender is made in the thread that uses it. What goes
    wrong is logged once, and again after something went well.
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
        """Send the page that waits, but for no longer than this."""
        with self._changed:
            self._ended = True
            self._changed.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        sender = self._make_sender()
        while (page := self._take()) is not None:
            try:
                sender.send(page)
            except OSError as error:
                self._tell_failed(str(error))
            except Exception:
                logger.exception("defect while metrics are sent")
            else:
                self._tell_sent()
        sender.close()

    def _take(self) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: self._page is not None or self._ended)
            page, self._page = self._page, None
            return page

    def _tell_failed(self, reason: str) -> None:
        if not self._is_failing:
            self._is_failing = True
            logger.warning("metrics cannot be sent to metrics_otlp_url, which is tried again: %s", reason)

    def _tell_sent(self) -> None:
        if self._is_failing:
            self._is_failing = False
            logger.info("metrics are sent to metrics_otlp_url again")
