"""A callable beside threads that call functions without a pause, so that their frames always change."""

from __future__ import annotations

import threading
from typing import Any, Final

N_THREADS: Final = 3


class Churning:
    """Return the input."""

    def __init__(self) -> None:
        for _ in range(N_THREADS):
            threading.Thread(target=_churn, daemon=True).start()

    def __call__(self, requests: list[Any]) -> Any:
        return [{"y": request["x"]} for request in requests]


def _churn() -> None:
    while True:
        _recurse(400)


def _recurse(depth: int) -> int:
    return depth and _recurse(depth - 1)
