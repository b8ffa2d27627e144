"""The one table from an error's code to what a client sees: (HTTP status, gRPC status number)."""

from __future__ import annotations

from typing import Final

from gpuserve.core.errors import Code

STATUS: Final[dict[Code, tuple[int, int]]] = {
    Code.INVALID_ARGUMENT: (400, 3),
    Code.NOT_FOUND: (404, 5),
    Code.ALREADY_EXISTS: (400, 6),
    Code.PERMISSION_DENIED: (403, 7),
    Code.UNAVAILABLE: (503, 14),
    Code.RESOURCE_EXHAUSTED: (413, 8),
    Code.NO_MEMORY: (503, 8),
    Code.RATE_LIMITED: (429, 8),
    Code.DEADLINE_EXCEEDED: (504, 4),
    Code.CANCELLED: (499, 1),
    Code.UNIMPLEMENTED: (501, 12),
    Code.INTERNAL: (500, 13),
}
