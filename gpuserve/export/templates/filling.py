"""Fills the templates of this folder. The language is told in ``__init__``."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode

from gpuserve.export.sizing.values import Reasoned, value_of

_PLACE: Final = re.compile(r"<(\w+)>")


def filled(template: str, places: Mapping[str, Any]) -> list[Any]:
    """The documents of a template by its path; comments are ``Reasoned``; KeyError: a place is empty."""
    lines, documents = _parsed(template)
    made = [_Filling(lines, places).value(document) for document in documents]
    return [document for document in made if document is not None]


@functools.cache
def _parsed(template: str) -> tuple[list[str], list[Node]]:
    text = (Path(__file__).parent / template).read_text(encoding="utf-8")
    return text.splitlines(), list(YAML(typ="safe", pure=True).compose_all(text))


@dataclass(frozen=True, slots=True)
class _Filling:
    lines: list[str]
    places: Mapping[str, Any]

    def value(self, node: Node, explained: int = -1) -> Any:
        """None is left out. The comment above the line ``explained`` has its place already."""
        condition, _, place = str(node.tag).partition(":")
        if condition in ("!if", "!unless") and bool(value_of(self.places[place])) != (condition == "!if"):
            return None
        if isinstance(node, MappingNode):
            return dict(self._entries(node, explained))
        return self._scalar(node) if isinstance(node, ScalarNode) else list(self._items(node))

    def _entries(self, node: MappingNode, explained: int) -> Iterator[tuple[str, Any]]:
        for key, value in node.value:
            line = key.start_mark.line
            made = self.value(value, line)
            if made is None:
                continue
            if key.value == "<<":
                yield from made.items()
            else:
                yield self._text(key.value), made if line == explained else self._reasoned(made, line)

    def _items(self, node: Node) -> Iterator[Any]:
        for item in node.value:
            line = item.start_mark.line
            loop, _, place = str(item.tag).partition(":")
            for more in self.places[place] if loop == "!each" else [{}]:
                filling = _Filling(self.lines, {**self.places, **more})
                made = filling.value(item, line)
                if made is not None:
                    yield filling._reasoned(made, line)

    def _scalar(self, node: ScalarNode) -> Any:
        if node.style is not None:
            return self._text(node.value)
        if alone := _PLACE.fullmatch(node.value):
            return self.places[alone[1]]
        try:
            return json.loads(node.value)  # true, 1, 0.5
        except ValueError:
            return self._text(node.value)

    def _reasoned(self, value: Any, line: int) -> Any:
        """The value with the comment above its line, which goes before a reason of its own."""
        above = (text.strip() for text in reversed(self.lines[:line]))
        comment = [text[1:].strip() for text in takewhile(lambda text: text.startswith("#"), above)]
        return Reasoned(value_of(value), self._text(" ".join(reversed(comment)))) if comment else value

    def _text(self, text: str) -> str:
        return _PLACE.sub(lambda found: str(value_of(self.places[found[1]])), text)
