"""What is told of an exception in user code: a line for the client, the whole for the log. Pure functions. A
client never sees a path or a traceback; the log sees both.
"""

from __future__ import annotations

import os
import re
from types import TracebackType
from typing import Final

from gpuserve_worker.protocol.wire import WireFailure

#: ``errors.Code.INTERNAL``: what a failure of the inference callable is for a client.
INTERNAL: Final = "INTERNAL"
#: The values of ``errors.Code``, which a callable may answer a request with.
CODES: Final = frozenset(
    {
        "ALREADY_EXISTS",
        "CANCELLED",
        "DEADLINE_EXCEEDED",
        "INTERNAL",
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "RESOURCE_EXHAUSTED",
        "UNAVAILABLE",
        "UNIMPLEMENTED",
    }
)
TEXT_LIMIT: Final = 4096
#: The log is given so much of a traceback.
TRACEBACK_LIMIT: Final = 16384
_OWN_DIRECTORY: Final = os.path.dirname(os.path.dirname(__file__)) + os.sep

#: An absolute path in quotes may hold spaces; outside them it ends at one. URLs are left alone.
_QUOTED_PATH: Final = re.compile(r"""(['"])/[^'"\n]*?([^'"/\n]*)\1""")
_BARE_PATH: Final = re.compile(r"""(?<![\w:/.~'"\\-])/(?:[^\s/'"<>:,;()]+/)*([^\s/'"<>:,;()]+)""")


class UnrecoverableError(Exception):
    """Raised by an inference callable: its model is in a state in which no further inference is possible.

    The client gets its text. What becomes of the server is told by ``on_unrecoverable`` of the model.
    """


class ToldError(Exception):
    """Its text was written for the client, who is told all of it."""


class DeviceFailure(Exception):
    """The device of an instance refused something, or failed in it."""

    @property
    def is_out_of_memory(self) -> bool:
        """Whether the device's memory did not suffice; nothing else is lost then."""
        return False


def client_text(error: BaseException, *, all_lines: bool = False) -> str:
    """One line of at most ``TEXT_LIMIT`` characters about ``error``, or all its lines, file paths cut to file
    names.
    """
    name = type(error).__name__
    text = _text(error)
    told = (text if all_lines else text.splitlines()[0].strip()) if text else name
    if isinstance(error, KeyError) and text:
        told = f"{name}: {told}"  # on its own it would be a quoted key and nothing else
    return _without_paths(told[: 4 * TEXT_LIMIT])[:TEXT_LIMIT]


def failure_of(error: BaseException, *, all_lines: bool = False) -> WireFailure:
    """What a client is told of an error: its text, and its ``code`` where the value is in ``CODES``."""
    code = getattr(getattr(error, "code", None), "value", None)
    is_told = isinstance(error, ToldError)
    text = cut(str(error), TEXT_LIMIT) if is_told else client_text(error, all_lines=all_lines)
    return WireFailure(code if isinstance(code, str) and code in CODES else INTERNAL, text)


def log_text(error: BaseException) -> str:
    return cut(" ".join(f"{type(error).__name__}: {_text(error)[: 4 * TEXT_LIMIT]}".split()), TEXT_LIMIT)


def log_traceback(error: BaseException) -> str:
    """The traceback of ``error`` from where the user's code begins."""
    import traceback  # most workers never need it

    frames: TracebackType | None = error.__traceback__
    while frames is not None and _is_ours(frames) and (frames.tb_next or isinstance(error, SyntaxError)):
        frames = frames.tb_next  # the text of a syntax error has its place in the user's file
    return cut("".join(traceback.format_exception(type(error), error, frames)), TRACEBACK_LIMIT)


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


def _is_ours(frame: TracebackType) -> bool:
    file = frame.tb_frame.f_code.co_filename
    return file.startswith((_OWN_DIRECTORY, "<frozen importlib"))


def _without_paths(line: str) -> str:
    return _BARE_PATH.sub(r"\1", _QUOTED_PATH.sub(r"\1\2\1", line))
