"""The log settings of a front: what clients ask for and change, applied to this process at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from gpuserve import logs
from gpuserve.log_settings import LogSettings


class LogControl:
    """The settings that hold. ``on_changed`` is told them when a client has changed some."""

    def __init__(
        self, log_level: str = "info", on_changed: Callable[[dict[str, Any]], None] = lambda _: None
    ) -> None:
        self.settings = LogSettings.of_level(log_level)
        self._on_changed = on_changed

    def update(self, changes: Mapping[str, Any]) -> LogSettings:
        """Change some fields, to checked values, and answer all."""
        if changes:
            self.restore(changes)
            self._on_changed(self.settings._asdict())
        return self.settings

    def restore(self, wire: Mapping[str, Any]) -> None:
        """Take over what clients had changed at an earlier front."""
        self.settings = self.settings._replace(**wire)
        logs.adjust(self.settings)
