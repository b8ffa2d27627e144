"""Writes to its input."""

from __future__ import annotations

from typing import Any

from gpuserve.decorators import batch


@batch
def doubled(x: Any) -> Any:
    x *= 2
    return {"y": x}
