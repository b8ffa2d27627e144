"""The text of a config.pbtxt: as a ``ModelConfig`` message, by protobuf's own reader, and with the place of
every field and value, which that reader does not keep. What the fields mean is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from google.protobuf import text_format  # type: ignore[import-untyped]
from tritonclient.grpc import model_config_pb2 as pb

from gpuserve.config.positions import Path, Span
from gpuserve.options import nearest

_START: Final = Span(1, 1, 1)
_ENDS: Final = frozenset({"}", ">"})
_BETWEEN: Final = frozenset({",", ";"})
_QUOTES: Final = frozenset({'"', "'"})
#: protobuf begins its messages with the place, and sometimes with the line.
_HEAD: Final = re.compile(r"^\d+:\d+ : (?:'.*': )?", re.DOTALL)
_NO_FIELD: Final = re.compile(
    r'Message type "inference\.(?P<message>[\w.]+)" has no field named "(?P<name>\w+)"'
)
_NO_VALUE: Final = re.compile(r'Enum type "inference\.(?P<enum>[\w.]+)" has no value named (?P<name>\w+)')


class PbtxtError(Exception):
    """The text is no ``ModelConfig``: what was expected, and where."""

    def __init__(self, text: str, span: Span) -> None:
        super().__init__(text)
        self.span = span


class _Places(NamedTuple):
    """Where a field stands: its name, and its value, whose first token is ``text``."""

    name: Span
    value: Span
    text: str = ""


@dataclass(frozen=True)
class Pbtxt:
    """A config.pbtxt. A path has the names of fields; behind that of a repeated field comes a number, behind
    that of a map a key.
    """

    message: Any
    lines: Sequence[str]
    places: Mapping[Path, _Places]

    def has(self, *path: str | int) -> bool:
        """Whether the text names the field at a path."""
        return path in self.places

    def span(self, path: Path, *, at_name: bool = False) -> Span:
        """Where the value at a path stands; of a path that the text does not have, its nearest ancestor."""
        while path and path not in self.places:
            path = path[:-1]
        found = self.places.get(path)
        return _START if found is None else found.name if at_name else found.value

    def line(self, number: int) -> str:
        return self.lines[number - 1] if 0 < number <= len(self.lines) else ""


def parse(text: str) -> Pbtxt:
    """Raises PbtxtError: the text is no ``ModelConfig``."""
    lines = text.split("\n")
    message = pb.ModelConfig()
    try:
        text_format.Parse(text, message)
    except text_format.ParseError as error:
        span = Span(error.GetLine() or 1, error.GetColumn() or 1, 1)
        raise PbtxtError(_expected(str(error)), span._replace(length=_length(lines, span))) from None
    return Pbtxt(message, lines, _Walk(lines).message(pb.ModelConfig.DESCRIPTOR))


def _length(lines: Sequence[str], span: Span) -> int:
    """The characters of the word at a place."""
    rest = lines[span.line - 1][span.column - 1 :] if span.line <= len(lines) else ""
    found = re.match(r"[\w.-]+", rest)
    return len(found[0]) if found else 1


def _expected(text: str) -> str:
    """What protobuf says, without the place, and with the name that was meant."""
    text = _HEAD.sub("", text).rstrip(".")
    if found := _NO_FIELD.search(text):
        known = _inner(found["message"]).fields_by_name
        likely = nearest(found["name"], known) or f"; its fields are {', '.join(known)}"
        return f"{found['message']} has no field {found['name']!r}{likely}"
    if found := _NO_VALUE.search(text):
        words = ", ".join(_inner(found["enum"]).values_by_name)
        return f"there is no {found['enum']} {found['name']}; expected one of {words}"
    return (text[:1].lower() + text[1:]).replace('"inference.', '"')


def _inner(name: str) -> Any:
    """The descriptor of a message or an enum of the file by its name without the package."""
    first, *rest = name.split(".")
    file = pb.DESCRIPTOR
    found = file.message_types_by_name.get(first) or file.enum_types_by_name[first]
    for one in rest:
        found = found.nested_types_by_name.get(one) or found.enum_types_by_name[one]
    return found


class _Walk:
    """One pass over text that protobuf has taken. ``places`` has each field by its path, and a repeated one
    with and without its number.
    """

    def __init__(self, lines: Sequence[str]) -> None:
        self._tokens = text_format.Tokenizer(lines)

    def message(self, descriptor: Any) -> dict[Path, _Places]:
        """The places in the rest of a message; its end is left where it is."""
        tokens, places = self._tokens, dict[Path, _Places]()
        while not tokens.AtEnd() and tokens.token not in _ENDS:
            field, name = descriptor.fields_by_name[tokens.token], self._span()
            tokens.NextToken()
            tokens.TryConsume(":")
            if tokens.TryConsume("["):
                while not tokens.TryConsume("]"):
                    self._value(field, name if field.message_type is None else self._span(), places)
                    tokens.TryConsume(",")
            else:
                self._value(field, name, places)
            if tokens.token in _BETWEEN:
                tokens.NextToken()
        return places

    def _value(self, field: Any, name: Span, places: dict[Path, _Places]) -> None:
        whole = _Places(name, self._span(), self._tokens.token)
        inner = dict[Path, _Places]()
        if field.message_type is None:
            self._skip_scalar()
        else:
            whole = whole._replace(value=name)
            self._tokens.NextToken()
            inner = self.message(field.message_type)
            self._tokens.NextToken()
        path = _numbered(field, inner, places)
        places.setdefault((field.name,), whole)
        places[path] = whole
        places |= {(*path, *below): one for below, one in inner.items()}

    def _skip_scalar(self) -> None:
        quoted = self._tokens.token[:1] in _QUOTES
        self._tokens.NextToken()
        while (
            quoted and self._tokens.token[:1] in _QUOTES and self._tokens.token
        ):  # one text in several parts
            self._tokens.NextToken()

    def _span(self) -> Span:
        here = self._tokens.ParseError("")
        return Span(here.GetLine(), here.GetColumn(), max(1, len(self._tokens.token)))


def _numbered(field: Any, inner: Mapping[Path, _Places], places: Mapping[Path, _Places]) -> Path:
    """The path of one value of a field: behind a repeated one a number, behind a map its key."""
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key = inner.get(("key",))
        return (field.name, "" if key is None else key.text.strip("\"'"))
    if not field.is_repeated:
        return (field.name,)
    number = 0
    while (field.name, number) in places:
        number += 1
    return (field.name, number)
