"""What a supervisor tells about its life to whoever shows it: the CLI's table, a log, a test."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """Called from the supervisor's own thread; must return at once."""

    def instance_changed(self, model: str, instance: str, device: str, state: str, phase: str) -> None:
        """An instance is in a new state (``InstanceState`` name) or a new phase of loading."""

    def server_ready(self, addresses: dict[str, str]) -> None:
        """Every model is loaded and the ports answer. Keys are "http", "grpc", "metrics" and "health"."""


class SilentObserver:
    """Tells nobody."""

    def instance_changed(self, model: str, instance: str, device: str, state: str, phase: str) -> None:
        """Ignored."""

    def server_ready(self, addresses: dict[str, str]) -> None:
        """Ignored."""
