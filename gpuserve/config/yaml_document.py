"""YAML 1.2 text as plain data, with the position of every key and value. In YAML 1.2 ``no`` is a string and
``0o17`` a number. The text is composed into nodes, which have marks, and the plain data is built from the
nodes, so that all duplicate keys are found.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NoReturn

import yaml
from yaml import MappingNode, MarkedYAMLError, Node, ScalarNode, SequenceNode, YAMLError
from yaml.reader import ReaderError

#: Keys and list positions from the root to a value: ``("models", 0, "name")``.
Path = tuple[str | int, ...]

_TAG = "tag:yaml.org,2002:"
#: Scalars of the YAML 1.2 core schema that are converted; any other known scalar stays text.
_BUILT_TAGS = frozenset(_TAG + kind for kind in ("null", "bool", "int", "float"))
_TEXT_TAGS = frozenset(_TAG + kind for kind in ("str", "timestamp", "value"))
#: A number as a key becomes text, as in JSON.
_KEY_TAGS = _TEXT_TAGS | {_TAG + "int"}
_MERGE_KEY = "<<"
#: The plain scalars of each tag, and their first characters. PyYAML's own table is of YAML 1.1.
_CORE_SCHEMA: Final = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?(?:0b[01_]+|0o[0-7_]+|0x[0-9a-fA-F_]+|[0-9][0-9_]*)", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)"
        r"|\.(?:nan|NaN|NAN)",
        list("-+.0123456789"),
    ),
)
_BASES: Final = {"0b": 2, "0o": 8, "0x": 16}
#: Python prints no integer that is much longer, and no key takes one.
_MAX_BITS: Final = 4096
_INDENT: Final = "indent the line as the entry before"
#: What to do, by the problem that libyaml finds.
_ADVICE: Final = {
    "mapping values are not allowed in this context": f"{_INDENT}, and write a space after each ':'",
    "did not find expected '-' indicator": _INDENT,
    "did not find expected key": _INDENT,
}
#: Bounds of a document: its values, counting each use of an alias, and its depth.
_MAX_VALUES: Final = 1_000_000
_MAX_DEPTH: Final = 100


class Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]
    """PyYAML's loader by libyaml, if PyYAML was built with it, with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012


for _kind, _pattern, _first in _CORE_SCHEMA:
    Loader.add_implicit_resolver(_TAG + _kind, re.compile(rf"(?:{_pattern})\Z"), _first)


class Span(NamedTuple):
    """A stretch of one line. ``line`` and ``column`` count from 1, ``length`` in characters."""

    line: int
    column: int
    length: int


_START = Span(1, 1, 1)


class YamlFault(NamedTuple):
    """An error in the YAML, or YAML that a config must not use, with its position."""

    text: str
    span: Span


class YamlSyntaxError(Exception):
    """Text that cannot be read as one YAML document."""

    def __init__(self, fault: YamlFault, lines: tuple[str, ...]) -> None:
        super().__init__(fault.text)
        self.fault = fault
        self.source_line = "".join(lines[fault.span.line - 1 : fault.span.line])


@dataclass(frozen=True)
class Document:
    """A parsed document. ``data`` is built even if there are faults, without the faulty values."""

    lines: tuple[str, ...]
    root: Node | None
    data: Any
    faults: tuple[YamlFault, ...]
    text: str

    def line(self, number: int) -> str:
        return self.lines[number - 1] if 0 < number <= len(self.lines) else ""

    def span_of_value(self, path: Path) -> Span:
        """Return the position of the value at a path, or of its nearest existing ancestor."""
        key, value = self._find(path)
        if value is None:
            return _START
        if key is not None and isinstance(value, ScalarNode) and value.value == "" and not value.style:
            return _span(key, self.lines)  # ``name:`` without a value: point at the key
        return _span(value, self.lines)

    def span_of_key(self, path: Path) -> Span:
        """Return the position of the last key of a path; for a list entry, the position of the entry."""
        key, _value = self._find(path)
        return self.span_of_value(path) if key is None else _span(key, self.lines)

    def other_names(self, path: Path) -> dict[str, str]:
        """Return the keys of a path that the text has by another name, Triton's or a former one, with it."""
        keys = [self._find(path[: end + 1])[0] for end in range(len(path))]
        named = {key.value: _written(key, self.lines) for key in keys if key is not None}
        # A key that differs otherwise is the same name, written with escapes or over several lines.
        return {ours: one for ours, one in named.items() if ours != one and one.isidentifier()}

    def _find(self, path: Path) -> tuple[Node | None, Node | None]:
        key, value = None, self.root
        for step in path:
            child = None if value is None else _child(value, step)
            if child is None:
                return None, value
            key, value = child
        return key, value


def parse(text: str, canonical_key: Callable[[Path], str] | None = None) -> Document:
    """Compose and build one document. ``canonical_key`` returns our name for the key at a path; positions
    stay those of the text. Raise YamlSyntaxError if the text is not one YAML document, or nested too deeply.
    """
    lines = tuple(text.splitlines())
    try:
        root = yaml.compose(text, Loader)
        if root is not None and canonical_key is not None:
            _rename_keys(root, (), canonical_key, set())
        builder = _Builder(lines)
        data = None if root is None else builder.build(root)
    except ReaderError as error:
        in_bytes = text.encode("utf-8", "surrogatepass")[: error.position]
        raise YamlSyntaxError(_unreadable(text, len(in_bytes.decode("utf-8", "ignore"))), lines) from None
    except UnicodeEncodeError as error:
        raise YamlSyntaxError(_unreadable(text, error.start), lines) from None
    except MarkedYAMLError as error:
        raise YamlSyntaxError(_syntax_fault(error, lines), lines) from None
    except YAMLError as error:
        raise YamlSyntaxError(YamlFault(f"not valid YAML: {error}", _START), lines) from None
    except RecursionError:
        raise YamlSyntaxError(YamlFault("nested too deeply to be read", _START), lines) from None
    return Document(lines, root, data, tuple(builder.faults), text)


def parse_value(text: str) -> Any:
    """Return the value in an environment variable or a flag: a YAML scalar or flow collection. Text that is
    no YAML is returned unchanged, so that the schema can say what it expected.
    """
    try:
        document = parse(text)
    except YamlSyntaxError:
        return text
    return text if document.faults else document.data


def _rename_keys(node: Node, path: Path, canonical_key: Callable[[Path], str], seen: set[int]) -> None:
    if id(node) in seen:  # reached by an alias before
        return
    seen.add(id(node))
    if isinstance(node, SequenceNode):
        for index, child in enumerate(node.value):
            _rename_keys(child, (*path, index), canonical_key, seen)
    elif isinstance(node, MappingNode):
        for key, value in node.value:
            if isinstance(key, ScalarNode) and key.value != _MERGE_KEY:
                key.value = canonical_key((*path, key.value))
                _rename_keys(value, (*path, key.value), canonical_key, seen)


class _Builder:
    """A builder of plain data from nodes, which collects faults and leaves out the faulty values."""

    def __init__(self, lines: tuple[str, ...]) -> None:
        self.faults: list[YamlFault] = []
        self._lines = lines
        self._open: set[int] = set()  # nodes being built: meeting one again is a cycle of aliases
        self._n_values = 0
        self._key = "the document"  # the last key, for messages

    def build(self, node: Node) -> Any:
        if id(node) in self._open:
            return self._fault("an alias cannot stand inside the value it names", node)
        self._n_values += 1
        if self._n_values > _MAX_VALUES:
            self._refuse(f"more than {_MAX_VALUES} values, those behind aliases included", node)
        if isinstance(node, ScalarNode):
            return self._scalar(node)
        if len(self._open) >= _MAX_DEPTH:
            self._refuse(f"nested more than {_MAX_DEPTH} deep", node)
        if node.tag not in {_TAG + "map", _TAG + "seq"}:
            return self._fault(f"the tag {node.tag} is not supported", node)
        self._open.add(id(node))
        try:
            if isinstance(node, SequenceNode):
                return [self.build(child) for child in node.value]
            return self._mapping(node) if isinstance(node, MappingNode) else None
        finally:
            self._open.discard(id(node))

    def _scalar(self, node: ScalarNode) -> Any:
        if node.tag in _TEXT_TAGS:
            return node.value
        if node.tag not in _BUILT_TAGS:
            return self._fault(f"the tag {node.tag} is not supported", node)
        try:
            value = _converted(node.tag.removeprefix(_TAG), node.value)
            if isinstance(value, int) and value.bit_length() > _MAX_BITS:
                bits = value.bit_length()
                text = f"{self._key}: expected an integer of at most 64 bits, given one of {bits}"
                return self._fault(text, node)
            return value
        except ValueError:
            return self._fault(f"{node.value!r} is no {node.tag.removeprefix(_TAG)}", node)

    def _mapping(self, node: MappingNode) -> dict[str, Any]:
        built: dict[str, Any] = {}
        first: dict[str, ScalarNode] = {}
        for key, value in node.value:
            if not isinstance(key, ScalarNode) or key.tag not in _KEY_TAGS:
                self._fault("a key must be a string; put quotes around it", key)
            elif key.value == _MERGE_KEY:
                continue
            elif key.value in first:
                line, written = first[key.value].start_mark.line + 1, _written(first[key.value], self._lines)
                name = "" if written == key.value else f" as {written!r}"  # a former name, or Triton's
                self._fault(f"key {key.value!r} is already given in line {line}{name}", key)
            else:
                first[key.value] = key
                self._key = key.value
                built[key.value] = self.build(value)
        for source in _merge_sources(node):  # of ``<<: *anchor``; the first of several takes precedence
            merged = self.build(source)
            if isinstance(merged, dict):
                built = merged | built
            else:
                self._fault("'<<' takes a mapping or a list of mappings", source)
        return built

    def _refuse(self, text: str, node: Node) -> NoReturn:
        raise YamlSyntaxError(YamlFault(text, _span(node, self._lines)), self._lines)

    def _fault(self, text: str, node: Node) -> None:
        self.faults.append(YamlFault(text, _span(node, self._lines)))


def _converted(kind: str, text: str) -> Any:
    text = text.lower()
    if kind == "null":
        return None
    if kind == "bool":
        return ("false", "true").index(text) == 1
    digits = text.replace("_", "")
    if kind == "float":
        return float(digits.replace(".inf", "inf").replace(".nan", "nan"))
    return int(digits, _BASES.get(digits.lstrip("+-")[:2], 10))


def _merge_sources(node: MappingNode) -> list[Node]:
    sources: list[Node] = []
    for key, value in node.value:
        if isinstance(key, ScalarNode) and key.value == _MERGE_KEY:
            sources.extend(value.value if isinstance(value, SequenceNode) else [value])
    return sources


def _child(node: Node, step: str | int) -> tuple[Node | None, Node] | None:
    if isinstance(node, SequenceNode):
        inside = isinstance(step, int) and 0 <= step < len(node.value)
        return (None, node.value[step]) if inside else None
    if not isinstance(node, MappingNode):
        return None
    for key, value in node.value:
        if isinstance(key, ScalarNode) and key.value == step:
            return key, value
    for source in _merge_sources(node):
        found = _child(source, step)
        if found is not None:
            return found
    return None


def _span(node: Node, lines: tuple[str, ...]) -> Span:
    """Return the position of a node on its first line."""
    start, end = node.start_mark, node.end_mark
    line = lines[start.line] if start.line < len(lines) else ""
    stop = end.column if end.line == start.line else len(line.rstrip())
    return Span(start.line + 1, start.column + 1, max(1, stop - start.column))


def _written(key: Node, lines: tuple[str, ...]) -> str:
    """Return a key as the text has it, before its renaming."""
    span = _span(key, lines)
    return lines[span.line - 1][span.column - 1 :][: span.length].strip("'\"")


def _syntax_fault(error: MarkedYAMLError, lines: tuple[str, ...]) -> YamlFault:
    mark = error.problem_mark or error.context_mark
    problem, context = error.problem or "", error.context or ""
    if problem in _ADVICE:
        text = f"{problem}; {_ADVICE[problem]}"
    elif problem.startswith("but "):  # the context is the first half of the sentence
        text = f"{context}, {problem}"
    else:
        text = ", ".join(part for part in (problem, context) if part)
    if mark is None:
        return YamlFault(f"not valid YAML: {text}", _START)
    if mark.line >= len(lines) > 0:  # the text ended too early: point behind its last character
        return YamlFault(f"not valid YAML: {text}", Span(len(lines), len(lines[-1]) + 1, 1))
    if re.fullmatch(" *\t", lines[mark.line][: mark.column + 1]):
        text = "the indentation has a tab, expected spaces"
    return YamlFault(f"not valid YAML: {text}", Span(mark.line + 1, mark.column + 1, 1))


def _unreadable(text: str, position: int) -> YamlFault:
    """Return the fault of a character at an offset that YAML does not allow."""
    before = text[:position]
    line = before.count("\n") + 1
    column = position - (before.rfind("\n") + 1) + 1
    character = text[position : position + 1]
    return YamlFault(f"not valid YAML: the character {character!r} is not allowed", Span(line, column, 1))
