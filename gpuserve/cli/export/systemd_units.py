"""Unit files for systemd: a socket unit that keeps the ports, and the service that serves a config file.

Connections that arrive while the service restarts wait in the backlog of the socket unit, so no client is
refused. The options need systemd 240 or later.
"""

from __future__ import annotations

import getpass
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

from gpuserve.cli.export.export_options import ExportFinding, export_name
from gpuserve.cli.export.pod_sizing import has_gpus

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gpuserve.cli.export.export_options import ExportOptions
    from gpuserve.config.load import Configuration
    from gpuserve.config.settings.server import ServerSettings

#: Time for the server's processes to end after the drain.
_END_S: Final = 30
#: The server is killed and restarted if its supervisor does not respond for this long.
_WATCHDOG_S: Final = 30
_TEMPLATES: Final = Path(__file__).parent / "templates" / "systemd"


def systemd_units(
    configuration: Configuration, options: ExportOptions, config: str, user: str
) -> dict[str, str]:
    """Return NAME.socket and NAME.service for a configuration, its path, and an account ("": this one)."""
    settings, name, path = (
        configuration.settings,
        export_name(configuration, options),
        os.path.abspath(config),
    )
    listen = [f"ListenStream={_address(settings.host_of(role))}:{port}" for role, port in _ports(settings)]
    program = os.path.join(os.path.dirname(sys.executable), "gpuserve")
    service = (
        (_TEMPLATES / "unit.service")
        .read_text()
        .format(
            name=name,
            command=" ".join(map(_quoted, (program, "serve", path))),
            folder=os.path.dirname(path).replace("%", "%%"),
            user=user or getpass.getuser(),
            watchdog_s=_WATCHDOG_S,
            stop_s=round((settings.lame_duck_s or 0) + settings.drain_timeout_s) + _END_S,
            memory_lock="# Memory that GPUs read is locked.\nLimitMEMLOCK=infinity\n"
            if has_gpus(configuration, options)
            else "",
        )
    )
    sockets = (_TEMPLATES / "unit.socket").read_text().format(name=name, listen="\n".join(listen))
    return {f"{name}.socket": sockets, f"{name}.service": service}


def _ports(settings: ServerSettings) -> list[tuple[str, int]]:
    """Return the roles and ports that systemd can keep; transport grpcio opens its port itself."""
    own = "grpc" if settings.transport == "grpcio" else ""
    return [(role, port) for role, port in settings.ports.items() if role != own]


def port_findings(settings: ServerSettings) -> Iterator[ExportFinding]:
    """Yield findings for ports that a socket unit cannot keep."""
    for role, port in _ports(settings):
        if port == 0:
            yield ("server", f"{role}_port"), "expected a fixed port for a socket unit, given 0"
        try:
            _address(settings.host_of(role))
        except OSError as error:
            text = f"expected a host with an address, given {settings.host_of(role)!r}: {error.strerror}"
            yield ("server", "host"), text


def _address(host: str) -> str:
    """Return a host as the numeric address that ``ListenStream`` needs. Raise OSError."""
    family, *_, address = socket.getaddrinfo(host or "0.0.0.0", None, type=socket.SOCK_STREAM)[0]
    return f"[{address[0]}]" if family is socket.AF_INET6 else str(address[0])


def _quoted(word: str) -> str:
    """Return a word of ``ExecStart`` without specifiers, variables and separators of systemd."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"' if any(character in " \\\"'" for character in word) else escaped
