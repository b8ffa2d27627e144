"""Failure texts of user code: a line without paths for clients, the traceback for the log. Pure."""

from __future__ import annotations

import re
from types import TracebackType
from typing import Final

from gpuserve_worker.protocol.wire import WireFailure

#: ``errors.Code.INTERNAL``, the code of a failure of the inference callable.
INTERNAL: Final = "INTERNAL"
#: The values of ``errors.Code`` with which a callable may fail a request.
CODES: Final = frozenset({
    "ALREADY_EXISTS", "CANCELLED", "DEADLINE_EXCEEDED", "INTERNAL", "INVALID_ARGUMENT", "NOT_FOUND",
    "RESOURCE_EXHAUSTED", "UNAVAILABLE", "UNIMPLEMENTED", "UNKNOWN",
})  # fmt: skip
TEXT_LIMIT: Final = 4096
#: Limit of a traceback in the log.
TRACEBACK_LIMIT: Final = 16384
_PACKAGES: Final = "gpuserve", "gpuserve_worker"

#: A quoted absolute path may contain spaces; an unquoted one ends at a space. URLs are left unchanged.
_QUOTED_PATH: Final = re.compile(r"""(['"])/[^'"\n]*?([^'"/\n]*)\1""")
_BARE_PATH: Final = re.compile(r"""(?<![\w:/.~'"\\-])/(?:[^\s/'"<>:,;()]+/)*([^\s/'"<>:,;()]+)""")


class UnrecoverableError(Exception):
    """Raised by a callable that can run no more; clients get the text, ``on_unrecoverable`` decides."""


class ClientFacingError(Exception):
    """An error whose whole text was written for the client."""


class DeviceFailure(Exception):
    """An error of an instance's device."""

    @property
    def is_out_of_memory(self) -> bool:
        """True if the device's memory was too small; nothing else is lost then."""
        return False


def client_text(error: BaseException, *, all_lines: bool = False) -> str:
    """Return the first line, or all, of an error's text without paths, up to ``TEXT_LIMIT``."""
    name = type(error).__name__
    text = _text(error)
    told = (text if all_lines else text.splitlines()[0].strip()) if text else name
    if isinstance(error, KeyError) and text:
        told = f"{name}: {told}"  # the text alone would be just a quoted key
    return _BARE_PATH.sub(r"\1", _QUOTED_PATH.sub(r"\1\2\1", told[: 4 * TEXT_LIMIT]))[:TEXT_LIMIT]


def failure_of(error: BaseException, *, all_lines: bool = False, prefix: str = "") -> WireFailure:
    """Return the failure that a client receives for an error: its text, and its ``code`` if the value is in
    ``CODES``. An exception that nobody wrote for the client has its type and ``prefix`` before it, if there
    is a prefix.
    """
    code = getattr(getattr(error, "code", None), "value", None)
    if isinstance(error, ClientFacingError):
        text = cut(str(error), TEXT_LIMIT)
    else:
        text = client_text(error, all_lines=all_lines)
        name = f"{type(error).__name__}: "
        if prefix:
            text = f"{prefix}{name if not text.startswith(name) else ''}{text}"
    return WireFailure(code if isinstance(code, str) and code in CODES else INTERNAL, text)


def log_text(error: BaseException) -> str:
    text = _printable(" ".join(_text(error)[: 4 * TEXT_LIMIT].split()))
    return cut(f"{type(error).__name__}: {text}" if text else type(error).__name__, TEXT_LIMIT)


def log_traceback(error: BaseException) -> str:
    """Return the traceback of ``error``, from the first frame of user code on. Return an empty text for an
    error class of ours if no user code has raised it: its sentence says everything.
    """
    import traceback  # most workers never need it

    frames: TracebackType | None = error.__traceback__
    while frames is not None and _is_ours(frames) and (frames.tb_next or isinstance(error, SyntaxError)):
        frames = frames.tb_next  # the text of a syntax error names the user's file
    if frames is not None and _is_ours(frames) and type(error).__module__.partition(".")[0] in _PACKAGES:
        return ""
    text = cut("".join(traceback.format_exception(type(error), error, frames)), TRACEBACK_LIMIT)
    return "\n".join(map(_printable, text.split("\n")))


def cut(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = most // 2
    return f"{text[:half]} … {len(text) - 2 * half} characters … {text[-half:]}"


def _text(error: BaseException) -> str:
    try:
        return str(error).strip()
    except Exception:  # the user's own __str__ may raise anything
        return ""


def _printable(text: str) -> str:
    """Escape control characters, which may come from a client and would control the operator's terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def _is_ours(frame: TracebackType) -> bool:
    """Return whether a frame runs our code. The file of the frame does not tell, because a decorator that is
    pickled with the user's function has no file.
    """
    module = str(frame.tb_frame.f_globals.get("__name__"))
    return module.partition(".")[0] in (*_PACKAGES, "importlib", "_frozen_importlib")
