"""What the alert rules are filled in with: which pods they watch, and how much memory is too much."""

from __future__ import annotations

from typing import Any, Final

from gpuserve.export.sizing.values import readable

_FULL: Final = 0.8


def scraped(name: str, namespace: str) -> str:
    """The labels that Prometheus gives to what it finds by our ServiceMonitor."""
    space = f',namespace="{namespace}"' if namespace else ""
    return f'job="{name}-metrics"{space}'


def alert_places(
    name: str, namespace: str, labels: dict[str, str] | None, *, max_arena_nbytes: int, on_gpu: bool
) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": namespace or None,
        "released_labels": labels,
        "scraped": scraped(name, namespace),
        "arena_warning_nbytes": round(max_arena_nbytes * _FULL),
        "arena_size": readable(max_arena_nbytes),
        "on_gpu": on_gpu,
    }
