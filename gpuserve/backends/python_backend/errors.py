"""Errors that a ``model.py`` raises, returns or receives, converted to and from the worker's errors."""

from __future__ import annotations

from typing import Any, ClassVar, Final

from gpuserve.core.errors import Code
from gpuserve_worker.inference.failure import ClientFacingError


class TritonModelException(Exception):
    """The exception that ``triton_python_backend_utils`` raises, and that a ``model.py`` may raise."""

    def message(self) -> str:
        return str(self)


class TritonError:
    """The error of one request: a text and a code."""

    UNKNOWN: ClassVar = 0
    INTERNAL: ClassVar = 1
    NOT_FOUND: ClassVar = 2
    INVALID_ARG: ClassVar = 3
    UNAVAILABLE: ClassVar = 4
    UNSUPPORTED: ClassVar = 5
    ALREADY_EXISTS: ClassVar = 6
    CANCELLED: ClassVar = 7

    __slots__ = ("_code", "_message")

    def __init__(self, message: str | bytes, code: int = INTERNAL) -> None:
        if code not in _CODES:
            raise TypeError(
                f"a TritonError has one of the codes TritonError.INTERNAL and so on, not {code!r}"
            )
        self._message = text_of(message, "the message of a TritonError")
        self._code = int(code)

    def code(self) -> int:
        return self._code

    def message(self) -> str:
        return self._message

    def __str__(self) -> str:
        return self._message

    def __repr__(self) -> str:
        return f"TritonError({self._message!r}, {self._code})"


def text_of(value: Any, what: str) -> str:
    """Return a str, or the text in bytes, which pybind11 also accepts. Raise TypeError for other values."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes | bytearray):
        return value.decode()
    raise TypeError(f"{what} is a str, but {type(value).__name__} was given")


#: The codes of a TritonError in the server's form.
_CODES: Final = {
    TritonError.UNKNOWN: Code.UNKNOWN,
    TritonError.INTERNAL: Code.INTERNAL,
    TritonError.NOT_FOUND: Code.NOT_FOUND,
    TritonError.INVALID_ARG: Code.INVALID_ARGUMENT,
    TritonError.UNAVAILABLE: Code.UNAVAILABLE,
    TritonError.UNSUPPORTED: Code.UNIMPLEMENTED,
    TritonError.ALREADY_EXISTS: Code.ALREADY_EXISTS,
    TritonError.CANCELLED: Code.CANCELLED,
}
_NUMBERS: Final = {
    **{code.value: number for number, code in _CODES.items()},
    **dict.fromkeys(("RESOURCE_EXHAUSTED", "NO_MEMORY", "DEADLINE_EXCEEDED"), TritonError.UNAVAILABLE),
}


class TritonRequestError(ClientFacingError):
    """A ``TritonError`` in the worker's form. The worker reads ``code``."""

    def __init__(self, error: TritonError) -> None:
        super().__init__(error.message())
        self.code = _CODES[error.code()]


def to_triton_error(error: Exception) -> TritonError:
    """Convert an error of the server, with the worker's ``code``, for a ``model.py``."""
    word = getattr(getattr(error, "code", None), "value", None)
    return TritonError(str(error), _NUMBERS.get(str(word), TritonError.INTERNAL))
