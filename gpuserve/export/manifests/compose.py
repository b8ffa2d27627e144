"""One server on one machine with what watches it: the places of the files for Docker Compose."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, Final

from gpuserve.export.sizing.ports import HTTP, METRICS, ServerPorts

if TYPE_CHECKING:
    from gpuserve.config.load import Configuration
    from gpuserve.export.sizing.options import ExportOptions

#: Where the folder of the config is in the container.
_FOLDER: Final = "/models"
#: Stopping takes so much longer than a drain: workers end, connections are closed.
_END_S: Final = 15
#: A container is not called unhealthy while its models may still load.
_LEAST_START_S: Final = 60


def compose_places(
    name: str, configuration: Configuration, options: ExportOptions, *, config: str, mount: str, on_gpu: bool
) -> dict[str, Any]:
    """What the files are filled in with: ``config`` is the path of the config, ``mount`` its folder."""
    settings, ports = configuration.settings, ServerPorts.of(configuration.settings, options)
    folder = mount if mount.startswith((".", "/")) else f"./{mount}"
    lame_duck_s = settings.lame_duck_s or 0
    return {
        "name": name,
        "image": options.image,
        "config_path": f"{_FOLDER}/{os.path.basename(config)}",
        "config_mount": f"{folder}:{_FOLDER}:ro",
        "published_ports": [f"{port}:{port}" for one, port in ports.numbers.items() if one != METRICS],
        "ready_check": _ready_check(ports),
        "start_period": f"{max(_LEAST_START_S, round(settings.load_timeout_s))}s",
        "grace_period": f"{round(lame_duck_s + settings.drain_timeout_s) + _END_S}s",
        "metrics_job": f"{name}-metrics",
        "metrics_target": f"gpuserve:{ports.numbers[METRICS]}",
        "on_gpu": on_gpu,
    }


def _ready_check(ports: ServerPorts) -> str:
    """The program of one line that fails while the server is not ready; it believes any certificate."""
    scheme, context = (
        ("https", ", context=ssl._create_unverified_context()") if HTTP in ports.tls else ("http", "")
    )
    url = f"{scheme}://localhost:{ports.numbers[HTTP]}/v2/health/ready"
    return f"import ssl, urllib.request as u; u.urlopen('{url}', timeout=4{context})"
