"""PyTriton's constants. Those about the Triton binary have no effect."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pathlib import Path

    PYTRITON_HOME: Path

DEFAULT_HTTP_PORT: Final = 8000
DEFAULT_GRPC_PORT: Final = 8001
DEFAULT_METRICS_PORT: Final = 8002
TRITON_LOCAL_IP: Final = "127.0.0.1"
TRITON_CONTEXT_FIELD_NAME: Final = "triton_context"
DEFAULT_TRITON_STARTUP_TIMEOUT_S: Final = 120
CREATE_TRITON_CLIENT_TIMEOUT_S: Final = 10


def __getattr__(name: str) -> Any:
    if name != "PYTRITON_HOME":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from gpuserve.compat.pytriton.utils import pytriton_home

    return pytriton_home()
