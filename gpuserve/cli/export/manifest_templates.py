"""The templates of manifests, filled and written as YAML. ``templates/__init__.py`` describes their language.

The writer is our own, because the text of manifests is kept in ``deploy/`` and must not depend on the version
of a library. A scalar is plain if no reader of YAML 1.1 or 1.2 could parse it as another type; every other
one is a JSON string, or a literal block. Reasons are comments above the values.
"""

from __future__ import annotations

import functools
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

import yaml
from yaml import MappingNode, Node, ScalarNode

from gpuserve.config.yaml_document import Loader

_PLACEHOLDER: Final = re.compile(r"<(\w+)>")


@dataclass(frozen=True, slots=True)
class Reasoned:
    """A value and its reason, which is one or a few sentences without a line break."""

    value: Any
    why: str


def value_of(part: Any) -> Any:
    """Return the value without its own reason; reasons inside the value stay."""
    return part.value if isinstance(part, Reasoned) else part


def fill_template(template: str, values: Mapping[str, Any]) -> list[Any]:
    """Return the documents of a template by its path, with comments as ``Reasoned``. Raise KeyError if a
    placeholder has no value.
    """
    lines, documents = _parse_template(template)
    filled = [_TemplateFiller(lines, values).value(document) for document in documents]
    return [document for document in filled if document is not None]


@functools.cache
def _parse_template(template: str) -> tuple[list[str], list[Node]]:
    text = (Path(__file__).parent / "templates" / template).read_text(encoding="utf-8")
    return text.splitlines(), list(yaml.compose_all(text, Loader))


@dataclass(frozen=True, slots=True)
class _TemplateFiller:
    lines: list[str]
    values: Mapping[str, Any]

    def value(self, node: Node, commented_line: int = -1) -> Any:
        """Return a node's value, or None if left out, with the comment above ``commented_line``."""
        condition, _, place = str(node.tag).partition(":")
        if condition in ("!if", "!unless") and bool(value_of(self.values[place])) != (condition == "!if"):
            return None
        if isinstance(node, MappingNode):
            return dict(self._entries(node, commented_line))
        return self._scalar(node) if isinstance(node, ScalarNode) else list(self._items(node))

    def _entries(self, node: MappingNode, commented_line: int) -> Iterator[tuple[str, Any]]:
        for key, value in node.value:
            line = key.start_mark.line
            filled = self.value(value, line)
            if filled is None:
                continue
            if key.value == "<<":
                yield from filled.items()
            else:
                shown = filled if line == commented_line else self._with_comment(filled, line)
                yield self._text(key.value), shown

    def _items(self, node: Node) -> Iterator[Any]:
        for item in node.value:
            line = item.start_mark.line
            loop, _, place = str(item.tag).partition(":")
            for more in self.values[place] if loop == "!each" else [{}]:
                filler = _TemplateFiller(self.lines, {**self.values, **more})
                filled = filler.value(item, line)
                if filled is not None:
                    yield filler._with_comment(filled, line)

    def _scalar(self, node: ScalarNode) -> Any:
        if node.style:
            return self._text(node.value)
        if alone := _PLACEHOLDER.fullmatch(node.value):
            return self.values[alone[1]]
        try:
            return json.loads(node.value)  # true, 1, 0.5
        except ValueError:
            return self._text(node.value)

    def _with_comment(self, value: Any, line: int) -> Any:
        """Return the value with the comment above its line, which replaces a reason of the value itself."""
        above = (text.strip() for text in reversed(self.lines[:line]))
        comment = [text[1:].strip() for text in takewhile(lambda text: text.startswith("#"), above)]
        return Reasoned(value_of(value), self._text(" ".join(reversed(comment)))) if comment else value

    def _text(self, text: str) -> str:
        return _PLACEHOLDER.sub(lambda found: str(value_of(self.values[found[1]])), text)


_WIDTH: Final = 110
#: Plain scalars: a letter or a slash first, so not a number; then no character with a meaning in YAML.
_PLAIN: Final = re.compile(r"[A-Za-z/][A-Za-z0-9_./@()-]*(?:[ :][A-Za-z0-9_./@()-]+)*")
#: Words that YAML 1.1 reads as a bool, a number or null.
_RESERVED_WORDS: Final = frozenset(
    {"true", "false", "yes", "no", "on", "off", "y", "n", "null", "nan", "inf"}
)
#: Characters that a literal block cannot hold.
_NO_BLOCK: Final = re.compile(
    r"[^\t\n\x20-\x7e\u00a0-\u2027\u202a-\ud7ff\ue000-\ufefe\uff00-\ufffd\U00010000-\U0010ffff]"
)
#: Characters that JSON allows in strings, and YAML does not.
_UNPRINTABLE: Final = re.compile(r"[\x7f-\x9f\u2028\u2029\ufeff\ufffe\uffff]")


def yaml_text(documents: Iterable[Any]) -> str:
    """Return the documents as a YAML stream."""
    return "---\n".join("".join(f"{line}\n" for line in _block_lines(one, 0)) for one in documents)


def _block_lines(tree: Any, column: int) -> Iterator[str]:
    """Yield the lines of a mapping, of a list, or of a scalar outside of both."""
    tree = value_of(tree)
    if isinstance(tree, dict) and tree:
        for key, value in tree.items():
            yield from _entry_lines(f"{_scalar(key)}:", value, column)
    elif isinstance(tree, list) and tree:
        for value in tree:
            yield from _item_lines(value, column)
    else:
        yield " " * column + _inline_value(tree)


def _entry_lines(head: str, value: Any, column: int) -> Iterator[str]:
    """Yield ``key: value``, or ``key:`` and a block below."""
    space = " " * column
    if isinstance(value, Reasoned):
        yield from _comment_lines(value.why, column)
        value = value.value
    if isinstance(value, dict) and value:
        yield space + head
        yield from _block_lines(value, column + 2)
    elif isinstance(value, list) and value:
        yield space + head
        yield from _block_lines(value, column)
    elif isinstance(value, str) and (style := _literal_style(value)):
        yield f"{space}{head} {style}"
        yield from (f"{space}  {line}" if line else "" for line in value.removesuffix("\n").split("\n"))
    else:
        yield f"{space}{head} {_inline_value(value)}"


def _item_lines(value: Any, column: int) -> Iterator[str]:
    """Yield an entry of a list. The comments of its first key stand above the dash."""
    if isinstance(value, Reasoned):
        yield from _comment_lines(value.why, column)
        value = value.value
    if not isinstance(value, dict | list) or not value:
        yield f"{' ' * column}- {_inline_value(value)}"
        return
    started = False
    for line in _block_lines(value, column + 2):
        if started or line.lstrip().startswith("#"):
            yield line if started else line[2:]
        else:
            yield f"{line[:column]}- {line[column + 2 :]}"
            started = True


def _comment_lines(text: str, column: int) -> Iterator[str]:
    for line in textwrap.wrap(text, _WIDTH - column - 2, break_on_hyphens=False, break_long_words=False):
        yield f"{' ' * column}# {line}"


def _inline_value(value: Any) -> str:
    if isinstance(value, dict | list):  # empty
        return "{}" if isinstance(value, dict) else "[]"
    return _scalar(value)


def _scalar(value: Any) -> str:
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) is not None and value.lower() not in _RESERVED_WORDS
        if is_plain:
            return value
        quoted = json.dumps(value, ensure_ascii=False)
        return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", quoted)
    return json.dumps(value)  # true, 1, null


def _literal_style(text: str) -> str:
    """Return ``|`` and its indicator for line breaks at the end, or "" if no literal block can hold it."""
    if "\n" not in text.rstrip("\n") or _NO_BLOCK.search(text) or text[0] in " \t\n":
        return ""
    stripped = text.rstrip("\n")
    if stripped.splitlines()[-1].isspace():
        return ""
    ends = len(text) - len(stripped)
    return ("|-", "|")[ends] if ends < 2 else "|+"
