"""What a ``model.py`` says went wrong, and what it is told. Which status a client sees is not known here."""

from __future__ import annotations

from typing import ClassVar, Final, NamedTuple

from gpuserve_worker.calling.failure import ToldError


class TritonModelException(Exception):
    """What is raised by a ``model.py``, and to it, where something cannot go on."""

    def message(self) -> str:
        return str(self)


class TritonError:
    """The error of one request: a text, and one of the codes below."""

    UNKNOWN: ClassVar = 0
    INTERNAL: ClassVar = 1
    NOT_FOUND: ClassVar = 2
    INVALID_ARG: ClassVar = 3
    UNAVAILABLE: ClassVar = 4
    UNSUPPORTED: ClassVar = 5
    ALREADY_EXISTS: ClassVar = 6
    CANCELLED: ClassVar = 7

    __slots__ = ("_code", "_message")

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        if not isinstance(message, str):
            raise TypeError(f"the message of a TritonError is a str, but {type(message).__name__} was given")
        if code not in _CODES:
            raise TypeError(
                f"a TritonError has one of the codes TritonError.INTERNAL and so on, not {code!r}"
            )
        self._message = message
        self._code = int(code)

    def code(self) -> int:
        return self._code

    def message(self) -> str:
        return self._message

    def __str__(self) -> str:
        return self._message

    def __repr__(self) -> str:
        return f"TritonError({self._message!r}, {self._code})"


class _Code(NamedTuple):
    value: str


#: The codes of a TritonError as the worker has them. There is no unknown error here: somebody made it.
_CODES: Final = {
    TritonError.UNKNOWN: _Code("INTERNAL"),
    TritonError.INTERNAL: _Code("INTERNAL"),
    TritonError.NOT_FOUND: _Code("NOT_FOUND"),
    TritonError.INVALID_ARG: _Code("INVALID_ARGUMENT"),
    TritonError.UNAVAILABLE: _Code("UNAVAILABLE"),
    TritonError.UNSUPPORTED: _Code("UNIMPLEMENTED"),
    TritonError.ALREADY_EXISTS: _Code("ALREADY_EXISTS"),
    TritonError.CANCELLED: _Code("CANCELLED"),
}
_NUMBERS: Final = {
    **{code.value: number for number, code in _CODES.items() if number},
    "RESOURCE_EXHAUSTED": TritonError.UNAVAILABLE,
    "NO_MEMORY": TritonError.UNAVAILABLE,
    "DEADLINE_EXCEEDED": TritonError.UNAVAILABLE,
}


class RefusedRequest(ToldError):
    """A ``TritonError`` on its way to the worker, which reads ``code``."""

    def __init__(self, error: TritonError) -> None:
        super().__init__(error.message())
        self.code = _CODES[error.code()]


def error_of(error: Exception) -> TritonError:
    """What a ``model.py`` is told of an error of the server, which has a ``code`` of the worker's."""
    word = getattr(getattr(error, "code", None), "value", None)
    return TritonError(str(error), _NUMBERS.get(str(word), TritonError.INTERNAL))
