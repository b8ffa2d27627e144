"""What the two clients of decoupled models share: whether a response is the last one, and which protocol
they need. Pure.
"""

from __future__ import annotations

from typing import Any, Final

from gpuserve.client.exceptions import ClientTimeoutError, ClientValueError
from gpuserve.client.url import GRPC, ServerUrl

_FINAL: Final = "triton_final_response"


def check_grpc(url: ServerUrl, client: str) -> None:
    """Responses of decoupled models come over gRPC only.

    Raises:
        ClientValueError: the URL is of another protocol.
    """
    if url.protocol != GRPC:
        raise ClientValueError(f"{client} is only supported for grpc protocol, got {url}")


def is_final(result: Any) -> bool:
    """Whether no response follows this one."""
    parameters = result.get_response().parameters
    return _FINAL in parameters and bool(parameters[_FINAL].bool_param)


def is_empty(result: Any) -> bool:
    """Whether a response has no outputs. A final one without outputs only says that it was the end."""
    return not result.get_response().outputs


def no_response(model: str, timeout_s: float) -> ClientTimeoutError:
    """The next response did not come in time."""
    return ClientTimeoutError(
        f"Timeout occurred while waiting for the next response of {model}. Timeout: {timeout_s} s"
    )
