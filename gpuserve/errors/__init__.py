"""The errors of gpuserve, each with a code of its own. No HTTP and no gRPC status is named here;
``front/v2/status.py`` is the one table that translates a code for a client.

::

    GpuserveError
    ├── RequestError            answers one request; ``code`` says how
    │   ├── InvalidArgument         the request is wrong and will stay wrong
    │   ├── NotFound                unknown model, version, or path
    │   ├── AlreadyExists           what is to be made is there
    │   ├── PermissionDenied        not for this client
    │   ├── Unavailable             not now: full, draining, worker lost; another try may succeed
    │   │   ├── QueueFull
    │   │   └── Stopping            the server ends: another one may take it
    │   ├── ResourceExhausted       larger than a limit
    │   ├── NoMemory                not now: the memory for requests is full; another try may succeed
    │   ├── RateLimited             not now: the client is over its rate limit
    │   ├── DeadlineExceeded
    │   ├── Cancelled               the client went away
    │   ├── Unimplemented
    │   └── Internal                the callable raised, or answered nonsense
    ├── ConfigError             a config file, flag or environment variable is wrong (exit code 4)
    ├── DeviceError             a device, or a library for it, that this machine does not have (exit code 5)
    ├── BindError               ``bind()`` was given something that cannot be served
    │   ├── DuplicateModel          a model of this name is bound already
    │   └── BadModelConfig          a value of ``ModelConfig`` that cannot be
    ├── StartupError            a model could not be loaded, or a process not be started (exit code 3)
    │   └── ModelLoadError          it was a model
    ├── ModelUnrecoverable      a model cannot go on, and the server ended because of it (exit code 6)
    ├── AttachError             the server of another program is not there, or has ended
    └── ControlError            there is no running server to be operated, or it does not answer

``UnrecoverableError`` is not one of ours to raise: an inference callable raises it. It belongs to the
worker, which is light and knows nothing of this package.
"""

from __future__ import annotations

import enum
from typing import ClassVar

from gpuserve_worker.calling.failure import UnrecoverableError as UnrecoverableError


class Code(enum.Enum):
    """What kind of failure a request met. The values travel between processes."""

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
    INTERNAL = "INTERNAL"


class GpuserveError(Exception):
    """Whatever gpuserve raises on purpose."""


class RequestError(GpuserveError):
    """A failure that answers one request. Its text is a sentence for the client: no path, no traceback.
    ``untried``: it came as an answer from where the request was refused.
    """

    code: ClassVar[Code] = Code.INTERNAL
    untried: bool = False


class InvalidArgument(RequestError):
    """The request breaks the protocol or the model's declaration."""

    code = Code.INVALID_ARGUMENT


class NotFound(RequestError):
    """The model, the version or the path does not exist."""

    code = Code.NOT_FOUND


class AlreadyExists(RequestError):
    """What the request would make is there already."""

    code = Code.ALREADY_EXISTS


class PermissionDenied(RequestError):
    """The server does this, but not for this client."""

    code = Code.PERMISSION_DENIED


class Unavailable(RequestError):
    """The server cannot take or finish this request now; another try may succeed."""

    code = Code.UNAVAILABLE


class QueueFull(Unavailable):
    """The model's queue is at its limit of requests or bytes."""


class Stopping(Unavailable):
    """The server takes nothing new, because it ends: another server may, or this one when it is back."""


class ResourceExhausted(RequestError):
    """The request is larger than a limit of the server."""

    code = Code.RESOURCE_EXHAUSTED


class NoMemory(RequestError):
    """The server has no memory for the request now; another try may succeed."""

    code = Code.NO_MEMORY


class RateLimited(RequestError):
    """The client sends more requests a second than it may; another try succeeds after ``retry_after_s``."""

    code = Code.RATE_LIMITED

    def __init__(self, text: str, retry_after_s: float = 1.0) -> None:
        super().__init__(text)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(RequestError):
    """The request's own time ran out."""

    code = Code.DEADLINE_EXCEEDED


class Cancelled(RequestError):
    """The client took the request back."""

    code = Code.CANCELLED


class Unimplemented(RequestError):
    """The protocol knows it, this model or server does not do it."""

    code = Code.UNIMPLEMENTED


class Internal(RequestError):
    """The inference callable raised or answered nonsense."""

    code = Code.INTERNAL


#: A full queue is told apart from other reasons to be unavailable between processes, by this.
_QUEUE_FULL = "QUEUE_FULL"
_BY_CODE = {one.code.value: one for one in RequestError.__subclasses__()} | {_QUEUE_FULL: QueueFull}


def inner_code(error: RequestError) -> str:
    """The code that ``request_error`` in another process of the server makes the same error of."""
    return _QUEUE_FULL if isinstance(error, QueueFull) else error.code.value


def request_error(code: str, text: str) -> RequestError:
    """The error that a code and a text from another process stand for; an unknown code is INTERNAL."""
    return _BY_CODE.get(code, Internal)(text)


class ConfigError(GpuserveError):
    """A config file, an environment variable or a flag is wrong. The text is ready to print."""


class DeviceError(GpuserveError):
    """A model needs a device, or a library for it, that this machine does not have."""


class BindError(GpuserveError):
    """``bind()`` was given something that cannot be served."""


class DuplicateModel(BindError):
    """A model of this name is bound already."""


class BadModelConfig(BindError):
    """A value of ``ModelConfig`` cannot be, or does not go with another."""


class StartupError(GpuserveError):
    """A model could not be loaded, or a process of the server could not be started."""


class ModelLoadError(StartupError):
    """A model could not be loaded: its callable cannot be imported, or made."""


class ModelUnrecoverable(GpuserveError):
    """An inference callable raised ``UnrecoverableError``, and all of its server or attachment has ended."""


class AttachError(GpuserveError):
    """There is no server of another program to attach to, it does not take this one, or it has ended."""


class ControlError(GpuserveError):
    """There is no running server that a command could operate, there are several, or it does not answer."""
