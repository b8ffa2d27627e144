"""Plain data as YAML text: block style, two spaces, reasons as comments above what they are about. Written
here and not by a YAML library: the text of manifests is kept in ``deploy/`` and must be the same with every
version of such a library. A scalar is plain where no reader of YAML 1.1 or 1.2 could take it for something
else; every other one is a JSON string, which YAML reads alike. Text of several lines is a literal block.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any, Final

from gpuserve.export.sizing.values import Reasoned, value_of

_WIDTH: Final = 110
#: A letter or a slash first, so that it is no number; then nothing that YAML has a meaning for.
_PLAIN: Final = re.compile(r"[A-Za-z/][A-Za-z0-9_./@()-]*(?:[ :][A-Za-z0-9_./@()-]+)*")
#: What YAML 1.1 takes for a bool or for nothing.
_WORDS: Final = frozenset({"true", "false", "yes", "no", "on", "off", "y", "n", "null", "nan", "inf"})
#: Characters that a literal block cannot hold.
_NO_BLOCK: Final = re.compile(
    r"[^\t\n\x20-\x7e\u00a0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)
#: Characters that YAML does not take even in quotes, and JSON does.
_UNPRINTABLE: Final = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def render(documents: Iterable[Any], header: str = "") -> str:
    """The documents one after the other; ``header`` stands above them as comments."""
    parts = ["".join(f"{line}\n" for line in _block(one, 0)) for one in documents]
    return "".join(f"{line}\n" for line in _comment(header, 0)) + "---\n".join(parts)


def _block(tree: Any, column: int) -> Iterator[str]:
    """The lines of a mapping, a list, or a scalar that stands by itself."""
    tree = value_of(tree)
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _entry(f"{_scalar(key)}:", value, column)
    elif isinstance(tree, list) and tree:
        for value in tree:
            yield from _item(value, column)
    else:
        yield " " * column + _inline(tree)


def _entry(head: str, value: Any, column: int) -> Iterator[str]:
    """``key: value`` or ``key:`` and a block below it."""
    space = " " * column
    if isinstance(value, Reasoned):
        yield from _comment(value.why, column)
        value = value.value
    if isinstance(value, dict) and value:
        yield space + head
        yield from _block(value, column + 2)
    elif isinstance(value, list) and value:
        yield space + head
        yield from _block(value, column)
    elif isinstance(value, str) and (style := _literal_style(value)):
        yield f"{space}{head} {style}"
        yield from (f"{space}  {line}" if line else "" for line in _lines(value))
    else:
        yield f"{space}{head} {_inline(value)}"


def _item(value: Any, column: int) -> Iterator[str]:
    """An entry of a list. The comments of its first key go above the dash."""
    if isinstance(value, Reasoned):
        yield from _comment(value.why, column)
        value = value.value
    if not isinstance(value, dict | list) or not value:
        yield f"{' ' * column}- {_inline(value)}"
        return
    started = False
    for line in _block(value, column + 2):
        if started or line.lstrip().startswith("#"):
            yield line if started else line[2:]
        else:
            yield f"{line[:column]}- {line[column + 2 :]}"
            started = True


def _comment(text: str, column: int) -> Iterator[str]:
    for line in textwrap.wrap(text, _WIDTH - column - 2, break_on_hyphens=False, break_long_words=False):
        yield f"{' ' * column}# {line}"


def _inline(value: Any) -> str:
    if isinstance(value, dict | list):  # an empty one
        return "{}" if isinstance(value, dict) else "[]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) is not None and value.lower() not in _WORDS
        return value if is_plain else _quoted(value)
    return json.dumps(value)  # true, 1, null


def _quoted(text: str) -> str:
    quoted = json.dumps(text, ensure_ascii=False)
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)


def _literal_style(text: str) -> str:
    """``|`` and what it does with the line breaks at the end; "" where no literal block can hold the text."""
    if "\n" not in text.rstrip("\n") or _NO_BLOCK.search(text) or text[0] in " \t\n":
        return ""
    stripped = text.rstrip("\n")
    if stripped.splitlines()[-1].isspace():
        return ""
    ends = len(text) - len(stripped)
    return ("|-", "|")[ends] if ends < 2 else "|+"


def _lines(text: str) -> list[str]:
    return text.removesuffix("\n").split("\n")
