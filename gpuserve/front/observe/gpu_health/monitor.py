"""The thread that asks NVML, round after round, and hears of Xids between the rounds. A call that hangs hangs
this thread and nothing else: it is a daemon that nobody joins, and whoever is told of the answers sees by
their age that none come. What they mean is not judged here.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from gpuserve.devices.inventory import load_nvml, read_machine, visible_devices
from gpuserve.devices.machine import GpuMonitorEvent, NvmlMissingEvent
from gpuserve.devices.names import VARIABLE
from gpuserve.devices.nvml import Nvml, NvmlMissing, NvmlUnresponsive

logger = logging.getLogger(__name__)

#: NVML that cannot be opened, or that a GPU is missing from, is opened again after so many intervals: what it
#: lists, and the handle of a GPU that was lost, stay as they were.
REOPEN_INTERVALS: Final = 5


class GpuMonitor:
    """Asks every ``interval_s``; ``tell`` gets the news. While ``is_gpu_lost``, NVML is opened anew."""

    def __init__(
        self, interval_s: float, tell: Callable[[GpuMonitorEvent], None], load: Callable[[], Any] = load_nvml
    ) -> None:
        self.is_gpu_lost = False
        self._interval_s = interval_s
        self._tell = tell
        self._load = load
        #: What the server calls the GPUs, by UUID; from the first look on.
        self._names: Mapping[str, str] | None = None
        self._stopped = threading.Event()
        self._knows_trouble = False

    def start(self) -> None:
        threading.Thread(target=self._run, name="gpuserve-nvml", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def _run(self) -> None:
        try:
            while not self._stopped.is_set():
                self._watch_for_a_while()
        except NvmlMissing as absent:
            self._say(NvmlMissingEvent(str(absent)))

    def _watch_for_a_while(self) -> None:
        try:
            nvml = Nvml(self._load)
            if self._names is None:
                self._names = names_of_gpus(self._load)
        except NvmlUnresponsive as silent:
            if not self._knows_trouble:
                logger.warning("GPUs cannot be watched now: NVML says: %s", silent)
            self._knows_trouble = True
            self._stopped.wait(self._interval_s * REOPEN_INTERVALS)
            return
        self._knows_trouble = False
        try:
            self._ask(nvml)
        finally:
            nvml.close()

    def _ask(self, nvml: Nvml) -> None:
        bad_rounds = 0
        while not self._stopped.is_set() and bad_rounds < REOPEN_INTERVALS:
            due_at = time.monotonic() + self._interval_s
            report = nvml.read(self._names or {})
            self._say(report)
            is_bad = self.is_gpu_lost or any(one.reading is None for one in report.gpus)
            bad_rounds = bad_rounds + 1 if is_bad else 0
            self._wait(nvml, due_at)

    def _wait(self, nvml: Nvml, due_at: float) -> None:
        """Wait for the next round, and pass on the errors that the driver reports meanwhile."""
        while not self._stopped.is_set() and (left_s := due_at - time.monotonic()) > 0:
            try:
                xid = nvml.next_xid(left_s)
            except NvmlUnresponsive:
                self._stopped.wait(left_s)
                return
            if xid is not None:
                self._say(xid)

    def _say(self, news: GpuMonitorEvent) -> None:
        if not self._stopped.is_set():
            self._tell(news)


def names_of_gpus(load: Callable[[], Any]) -> dict[str, str]:
    gpus = read_machine(Path("/"), load).gpus
    return {one.uuid: one.name for one in visible_devices(gpus, os.environ.get(VARIABLE))}
