"""The errors of gpuserve, public in ``gpuserve.errors``. A ``RequestError`` answers one request, by its code;
``front/requests/server_status.py`` translates codes to HTTP and gRPC statuses. The other errors end a start
or a command. Inference callables raise ``UnrecoverableError`` of the worker package.
"""

from __future__ import annotations

import enum
from typing import ClassVar


class Code(enum.Enum):
    """The kind of a request's failure. The values are sent between processes."""

    INVALID_ARGUMENT = "INVALID_ARGUMENT"
    NOT_FOUND = "NOT_FOUND"
    ALREADY_EXISTS = "ALREADY_EXISTS"
    PERMISSION_DENIED = "PERMISSION_DENIED"
    UNAVAILABLE = "UNAVAILABLE"
    RESOURCE_EXHAUSTED = "RESOURCE_EXHAUSTED"
    NO_MEMORY = "NO_MEMORY"
    RATE_LIMITED = "RATE_LIMITED"
    DEADLINE_EXCEEDED = "DEADLINE_EXCEEDED"
    CANCELLED = "CANCELLED"
    UNIMPLEMENTED = "UNIMPLEMENTED"
    UNKNOWN = "UNKNOWN"
    INTERNAL = "INTERNAL"


class GpuserveError(Exception):
    """The base class of all errors that gpuserve raises on purpose."""


class RequestError(GpuserveError):
    """A request's failure, in a sentence without paths for the client. ``untried``: refused before a try."""

    code: ClassVar[Code] = Code.INTERNAL
    untried: bool = False


class InvalidArgument(RequestError):
    """The request breaks the protocol or the model's declaration."""

    code = Code.INVALID_ARGUMENT


class NotFound(RequestError):
    """The model, the version or the path does not exist."""

    code = Code.NOT_FOUND


class AlreadyExists(RequestError):
    """The object that the request would create exists already."""

    code = Code.ALREADY_EXISTS


class PermissionDenied(RequestError):
    """The server does not allow the request for this client."""

    code = Code.PERMISSION_DENIED


class Unavailable(RequestError):
    """The server cannot accept or finish the request now; a retry may succeed."""

    code = Code.UNAVAILABLE


class QueueFull(Unavailable):
    """The model's queue is at its limit of requests or bytes."""


class Stopping(Unavailable):
    """The server accepts no new requests, because it is stopping. Another server may accept them."""


class ResourceExhausted(RequestError):
    """The request is larger than a limit of the server."""

    code = Code.RESOURCE_EXHAUSTED


class NoMemory(RequestError):
    """The server has no memory for the request now; a retry may succeed."""

    code = Code.NO_MEMORY


class RateLimited(RequestError):
    """The client exceeds its rate limit; a retry succeeds after ``retry_after_s``."""

    code = Code.RATE_LIMITED

    def __init__(self, text: str, retry_after_s: float = 1.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(RequestError):
    """The deadline of the request has passed."""

    code = Code.DEADLINE_EXCEEDED


class Cancelled(RequestError):
    """The client cancelled the request."""

    code = Code.CANCELLED


class Unimplemented(RequestError):
    """The protocol defines the request, but this model or server does not implement it."""

    code = Code.UNIMPLEMENTED


class Unknown(RequestError):
    """The inference callable failed the request with this code."""

    code = Code.UNKNOWN


class Internal(RequestError):
    """The inference callable raised, or returned invalid outputs."""

    code = Code.INTERNAL


#: The code between processes for a full queue, to distinguish it from other reasons to be unavailable.
_QUEUE_FULL = "QUEUE_FULL"
_BY_CODE = {one.code.value: one for one in RequestError.__subclasses__()} | {_QUEUE_FULL: QueueFull}


def inner_code(error: RequestError) -> str:
    """Return the code from which ``request_error`` makes the same error in another process of the server."""
    return _QUEUE_FULL if isinstance(error, QueueFull) else error.code.value


def request_error(code: str, text: str) -> RequestError:
    """Return the error for a code and a text from another process; an unknown code becomes INTERNAL."""
    return _BY_CODE.get(code, Internal)(text)


class ConfigError(GpuserveError):
    """A config file, an environment variable or a flag is wrong. The text is ready to print."""


class DeviceError(GpuserveError):
    """A model needs a device, or a library for it, that this machine lacks."""


class BindError(GpuserveError):
    """``bind()`` was given something that cannot be served."""


class DuplicateModel(BindError):
    """A model of this name is bound already."""


class BadModelConfig(BindError):
    """A value of ``ModelConfig`` is invalid, or conflicts with another value."""


class StartupError(GpuserveError):
    """A model failed to load, or a process of the server failed to start."""


class ModelLoadError(StartupError):
    """A model failed to load: its callable cannot be imported or created."""


class ModelUnrecoverable(GpuserveError):
    """An inference callable raised ``UnrecoverableError``, and all of its server or attachment has ended."""


class AttachError(GpuserveError):
    """No server of another program was found, it does not accept this program, or it has ended."""


class ControlError(GpuserveError):
    """No running server was found for a command, several were found, or the server does not answer."""


# Tracebacks and pickles name the public import path.
for _error in [value for value in globals().values() if isinstance(value, type)]:
    _error.__module__ = "gpuserve.errors"
