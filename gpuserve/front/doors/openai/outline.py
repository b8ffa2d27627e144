"""The outline of a JSON body: enough of it to route the request. Pure.

A JSON parser holds the interpreter's lock until it returns, also in a thread. So a long body is first reduced
to its outline, slice by slice: nested strings and long strings lose their content, and a body with too many
values is refused. What is left takes a parser a few milliseconds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from gpuserve.core.errors import ResourceExhausted
from gpuserve.front.requests.json_values import MAX_VALUES

#: No call of a function written in C reads more than this.
_SLICE_NBYTES: Final = 64 << 10
#: The maximum size of an outline. 131,072 numbers of 24 digits need less.
_MAX_NBYTES: Final = 4 << 20
#: The maximum length of a string that keeps its content; the name of a model has 128 characters, escaped 768.
_MAX_STRING_NBYTES: Final = 1024
_ELIDED: Final = '"…"'.encode()
#: Stands for an escaped backslash or quotation mark. No name of a model has a slash.
_ESCAPED: Final = rb"\/"
_SEPARATORS: Final = frozenset({b":", b",", b": ", b", "})


def outline(parts: Iterable[bytes]) -> bytes:
    """Return the outline of a JSON text that is in parts. MalformedJson JSON may become well-formed here.

    Raises:
        ResourceExhausted: the text has more than ``MAX_VALUES`` values, or its outline is too large.
    """
    kept: list[bytes] = []
    string = cut = b""
    in_string = False
    depth = n_separators = n_strings = nbytes = 0
    for piece in (
        part[start : start + _SLICE_NBYTES] for part in parts for start in range(0, len(part), _SLICE_NBYTES)
    ):
        text = (cut + piece).replace(b"\\\\", _ESCAPED).replace(b'\\"', _ESCAPED)
        cut = b"\\" if text.endswith(b"\\") else b""  # it escapes the first byte of the next slice
        first, *others = text.removesuffix(cut).split(b'"')
        for number, part in enumerate((first, *others)):
            if number:  # behind a quotation mark
                if in_string:
                    is_kept = depth < 2 and len(string) <= _MAX_STRING_NBYTES
                    kept.append(b'"%b"' % string if is_kept else _ELIDED)
                    nbytes += len(kept[-1])
                    n_strings += 1
                in_string = not in_string
                string = b""
            if in_string:
                string += part[: _MAX_STRING_NBYTES + 1 - len(string)]
                continue
            n_separators += part.count(b",") + part.count(b":")
            if part not in _SEPARATORS:
                part = part.translate(None, b" \t\r\n")
                depth += part.count(b"[") + part.count(b"{") - part.count(b"]") - part.count(b"}")
            kept.append(part)
            nbytes += len(part)
        if max(n_separators, n_strings - 1) > MAX_VALUES:
            raise ResourceExhausted(f"the body holds more values than expected, at most {MAX_VALUES}")
        if nbytes > _MAX_NBYTES:
            raise ResourceExhausted(
                f"the body holds more than {_MAX_NBYTES} bytes beside its texts, expected at most so many"
            )
    if in_string:
        kept.append(b'"')  # for the parser to refuse
    return b"".join(kept)
