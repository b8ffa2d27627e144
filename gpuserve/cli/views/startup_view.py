"""What is seen while models load: a live table on a terminal, log lines elsewhere; then the addresses. The
views only show. rich is imported for the table alone: a server without a terminal does not carry it.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, TextIO

from gpuserve.cli.views.client_command import client_command
from gpuserve.config.settings import logs
from gpuserve.model.spec import ModelSpec
from gpuserve.supervisor.processes.lifecycle import ServerObserver

if TYPE_CHECKING:
    from rich.live import Live
    from rich.table import Table

logger = logging.getLogger(__name__)

_LOADING: Final = "LOADING"
_READY: Final = "READY"
#: States that a start goes through. Of the others the supervisor's own log says more: the reason.
_STARTING: Final = frozenset({_LOADING, _READY})
_REFRESHES_PER_SECOND: Final = 8
#: What is said at the end of a start.
ENDING: Final = "Ctrl-C stops the server."
FOLLOWING: Final = "Files are followed: what changes is loaded anew."
_TITLES: Final = {"http": "HTTP", "grpc": "gRPC", "metrics": "metrics", "health": "health"}


class LogView(ServerObserver):
    """A view that writes a log line for each change, and the addresses at the end."""

    def __init__(self, show_ready: Callable[[dict[str, str]], None], clock: Callable[[], float]) -> None:
        self._show_ready = show_ready
        self._clock = clock
        self._loading_since: dict[tuple[str, str], float] = {}

    def instance_changed(self, model: str, instance: str, device: str, state: str, phase: str) -> None:
        text, now = _doing(state, phase), self._clock()
        if state == _LOADING:
            self._loading_since.setdefault((model, instance), now)
        else:
            since = self._loading_since.pop((model, instance), now)
        if state == _READY:
            text += f" after {now - since:.1f} s"
        extra = {"model": model, "instance": instance, "device": device}
        logger.log(logging.INFO if state in _STARTING else logging.DEBUG, "%s", text, extra=extra)

    def server_ready(self, addresses: dict[str, str]) -> None:
        self._show_ready(addresses)


@dataclass
class _Row:
    model: str
    instance: str
    device: str
    doing: str
    since: float
    seconds: float | None = None  # None while it loads


class TableView(ServerObserver):
    """A view that is a live table until the server is ready, and writes log lines from then on."""

    def __init__(self, later: LogView, clock: Callable[[], float]) -> None:
        self._later = later
        self._clock = clock
        self._rows: dict[tuple[str, str], _Row] = {}
        self._live: Live | None = None

    def open(self) -> None:
        """Begin to draw, on stderr; what others write there appears above the table."""
        from rich.console import Console
        from rich.live import Live

        self._live = Live(
            console=Console(stderr=True),
            get_renderable=self.table,
            refresh_per_second=_REFRESHES_PER_SECOND,
            redirect_stdout=False,
        )
        self._live.start()

    def close(self) -> None:
        """Draw for the last time; the table stays on the terminal."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def instance_changed(self, model: str, instance: str, device: str, state: str, phase: str) -> None:
        if self._live is None:
            self._later.instance_changed(model, instance, device, state, phase)
            return
        now = self._clock()
        row = self._rows.setdefault((model, instance), _Row(model, instance, device, "", now))
        row.doing = _doing(state, phase)
        row.seconds = now - row.since if state == _READY else None

    def server_ready(self, addresses: dict[str, str]) -> None:
        self.close()
        self._later.server_ready(addresses)

    def table(self) -> Table:
        """Return the rows as they are now. Called from rich's own thread as well."""
        from rich.table import Table

        table = Table("Model", "Instance", "Device", "Phase", box=None, pad_edge=False)
        table.add_column("Seconds", justify="right")
        for row in list(self._rows.values()):
            seconds = self._clock() - row.since if row.seconds is None else row.seconds
            style = "green" if row.seconds is not None else ""
            table.add_row(row.model, row.instance, row.device, row.doing, f"{seconds:.1f}", style=style)
        return table


@contextlib.contextmanager
def startup_view(
    log_format: str, models: Sequence[ModelSpec], stream: TextIO, closing: str = ENDING
) -> Iterator[ServerObserver]:
    """Give the view that suits the stream: a table on a terminal unless the log is JSON. ``closing`` is
    said last, once it is ready.
    """

    def show_ready(addresses: dict[str, str]) -> None:
        if log_format == "json":
            logger.info(
                "ready: %s", ", ".join(f"{_TITLES[role]} {where}" for role, where in addresses.items())
            )
        else:
            logs.write(ready_text(addresses, models, closing))

    lines = LogView(show_ready, time.monotonic)
    if log_format == "json" or not stream.isatty():
        yield lines
        return
    table = TableView(lines, time.monotonic)
    table.open()
    try:
        yield table
    finally:
        table.close()


def ready_text(addresses: dict[str, str], models: Sequence[ModelSpec], closing: str = ENDING) -> str:
    """Write the addresses of the server, and a command to try it with."""
    lines = [f"  {_TITLES[role]:<8} {where}" for role, where in addresses.items()]
    command = client_command(addresses, models[0]) if models else None
    if command is not None:
        lines += ["Try it from another shell:", f"  {command}"]
    return "\n".join(["Ready.", *lines, closing, ""])


def _doing(state: str, phase: str) -> str:
    """Return the phase of an instance, which says more, or else its state."""
    return phase if phase and state != _READY else state.lower()
