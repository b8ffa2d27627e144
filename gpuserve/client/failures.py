"""What went wrong below a client, told in the clients' own errors. Pure."""

from __future__ import annotations

from typing import Any, Final

from gpuserve.client.exceptions import (
    ClientError,
    ClientInferenceServerError,
    ClientModelUnavailableError,
    ClientTimeoutError,
)

_DEADLINE: Final = frozenset({"StatusCode.DEADLINE_EXCEEDED", "504"})
_NOT_FOUND: Final = frozenset({"StatusCode.NOT_FOUND", "404"})
_RESTRICTED: Final = "is restricted, expecting header"


def inference_error(error: Exception, timeout_s: float | None) -> ClientError:
    """Why an inference failed. A connection that could not be made, or broke, counts as a timeout."""
    if isinstance(error, OSError) or status(error) in _DEADLINE:
        limit = "" if timeout_s is None else f" Timeout: {timeout_s} s."
        return ClientTimeoutError(f"Timeout occurred during inference request.{limit} Message: {text(error)}")
    return ClientInferenceServerError(f"Error occurred during inference request. Message: {text(error)}")


def server_not_ready(error: Exception | None) -> ClientError:
    """The wait for a server is over; ``error`` is what the last question met, if it was not answered."""
    return ClientTimeoutError("Waiting for server to be ready timed out." + _message(error))


def model_not_ready(shown: str, error: Exception | None) -> ClientError:
    """The wait for a model is over; ``error`` is what the question for its configuration met."""
    if error is not None and _is_unknown_model(error):
        return ClientModelUnavailableError(
            f"Model {shown} is unavailable: the server has no such model. Message: {text(error)}"
        )
    return ClientTimeoutError(f"Waiting for model {shown} to be ready timed out." + _message(error))


def is_refusal(error: Exception) -> bool:
    """Whether the server will not answer, however long a client waits: the access token is wrong."""
    return _RESTRICTED in text(error)


def status(error: Exception) -> str | None:
    """The HTTP status, or gRPC's as "StatusCode.NAME"; None where there was no answer."""
    found: Any = getattr(error, "status", None) or getattr(error, "code", None)
    if not callable(found):
        return None
    value = found()
    return None if value is None else str(value)


def text(error: Exception) -> str:
    """The message of the server, or of the connection."""
    for name in ("message", "details"):
        said = getattr(error, name, None)
        if callable(said) and (words := said()):
            return str(words)
    return str(error) or type(error).__name__


def _is_unknown_model(error: Exception) -> bool:
    return status(error) in _NOT_FOUND or "unknown model" in text(error)


def _message(error: Exception | None) -> str:
    return "" if error is None else f" Message: {text(error)}"
