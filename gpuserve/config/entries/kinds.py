"""What a value of a config file must be by itself: one class a kind. A kind reads a value, notes what is
wrong with it, and says the same as JSON Schema. No type is turned into another, but integers into floats
where those are wanted, and texts such as 10s into lengths of time. No file, no environment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve.options import WIRE_INTEGERS, durations

#: Keys and list positions from the root to a value.
Place: TypeAlias = tuple[str | int, ...]
#: What is wrong: a key that there is not, one that must be there, a value of another kind, or of this one.
UNKNOWN: Final = "unknown"
MISSING: Final = "missing"
UNEXPECTED: Final = "unexpected"
WRONG: Final = "wrong"


class Mistake(NamedTuple):
    """What is wrong at a place: ``text`` is what was expected there, or for ``WRONG`` the whole story."""

    path: Place
    kind: str
    text: str = ""
    given: Any = None
    #: For ``UNKNOWN`` the keys that there are.
    known: tuple[str, ...] = ()
    #: Whether the key itself is wrong, and not its value.
    at_key: bool = False


class Kind:
    """What a value must be; of this class itself, anything."""

    def read(self, value: Any, path: Place, found: list[Mistake]) -> Any:
        """What is made of the value; what is wrong with it is added to ``found``."""
        return value

    def schema(self) -> dict[str, Any]:
        """JSON Schema of such values; other mappings are named in it by ``$ref``."""
        return {}

    def parts(self) -> list[Kind]:
        """The kinds that this one is made of."""
        return []


class Text(Kind):
    """A string, one of ``words`` where there are some. ``reads`` gives what is taken for it, or raises."""

    def __init__(
        self, some: bool = False, words: tuple[str, ...] = (), reads: Callable[[Any], str] | None = None
    ) -> None:
        self._some = some
        self.words = words
        self._reads = reads

    def read(self, value: Any, path: Place, found: list[Mistake]) -> Any:
        try:
            expected = self._expected(value)
            if not expected and self._reads is not None:
                value = self._reads(value)
            if not expected and self.words and value not in self.words:
                expected = f"one of {_listed(self.words)}"
        except ValueError as error:
            found.append(Mistake(path, WRONG, str(error)))
            return value
        if expected:
            found.append(Mistake(path, UNEXPECTED, expected, value))
        return value

    def _expected(self, value: Any) -> str:
        """What a value should be that cannot be read; "" where it can."""
        if self.words and self._reads is not None:  # it says itself what is wrong with any value
            return ""
        if not isinstance(value, str):
            return f"one of {_listed(self.words)}" if self.words else "a string"
        return "a string that is not empty" if self._some and not value else ""

    def schema(self) -> dict[str, Any]:
        words = {"enum": list(self.words)} if self.words else {}
        return {"type": "string", **words, **({"minLength": 1} if self._some else {})}


def _listed(words: tuple[str, ...]) -> str:
    *first, last = map(repr, words)
    return f"{', '.join(first)} or {last}" if first else last


class Number(Kind):
    """An integer, or where it is ``real`` any finite number; never true or false."""

    def __init__(self, real: bool = False, least: float | None = None, most: float | None = None) -> None:
        self._real = real
        self._least = least
        self._most = most

    def read(self, value: Any, path: Place, found: list[Mistake]) -> Any:
        expected = ""
        if isinstance(value, bool) or not isinstance(value, int | float if self._real else int):
            expected = "a number" if self._real else "an integer"
        elif isinstance(value, float) and not math.isfinite(value):
            expected = "a finite number"
        elif isinstance(value, int) and value not in WIRE_INTEGERS:
            expected = f"a number from {WIRE_INTEGERS.start} to {WIRE_INTEGERS.stop - 1}"
        elif self._least is not None and value < self._least:
            expected = f"a number of at least {self._least}"
        elif self._most is not None and value > self._most:
            expected = f"a number of at most {self._most}"
        if expected:
            found.append(Mistake(path, UNEXPECTED, expected, value))
            return value
        return float(value) if self._real else value

    def schema(self) -> dict[str, Any]:
        bounds = {"minimum": self._least, "maximum": self._most}
        kind = "number" if self._real else "integer"
        return {"type": kind, **{key: one for key, one in bounds.items() if one is not None}}


class Duration(Number):
    """A length of time: a number in its unit, or a text such as ``10s``."""

    def __init__(self, unit: str, least: float | None = None, most: float | None = None) -> None:
        super().__init__(unit == durations.SECONDS, least, most)
        self._unit = unit

    def read(self, value: Any, path: Place, found: list[Mistake]) -> Any:
        if not isinstance(value, str):
            return super().read(value, path, found)
        try:
            read = durations.whole(durations.duration(value, self._unit), self._unit)
        except (ValueError, OverflowError):
            found.append(Mistake(path, UNEXPECTED, durations.expected(self._unit), value))
            return value
        wrong: list[Mistake] = []
        made = super().read(read, path, wrong)
        found += [one._replace(given=value) for one in wrong]
        return made

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [super().schema(), {"type": "string", "pattern": durations.PATTERN}]}


class NumberOrWord(Number):
    """An integer, or one of ``words``, for which ``reads`` gives the integer."""

    def __init__(
        self,
        words: tuple[str, ...],
        reads: Callable[[Any], Any],
        least: float | None = None,
        most: float | None = None,
    ) -> None:
        super().__init__(least=least, most=most)
        self._words = words
        self._reads = reads

    def read(self, value: Any, path: Place, found: list[Mistake]) -> Any:
        if isinstance(value, str) and value not in self._words:
            found.append(Mistake(path, UNEXPECTED, f"an integer or {_listed(self._words)}", value))
            return value
        return super().read(self._reads(value), path, found)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [super().schema(), {"type": "string", "enum": list(self._words)}]}


class Flag(Kind):
    """True or false, and no number."""

    def read(self, value: Any, path: Place, found: list[Mistake]) -> Any:
        if not isinstance(value, bool):
            found.append(Mistake(path, UNEXPECTED, "true or false", value))
        return value

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


class FlagOrNumber(Kind):
    """True, false, or a finite number."""

    def read(self, value: Any, path: Place, found: list[Mistake]) -> Any:
        is_number = isinstance(value, int) and value in WIRE_INTEGERS
        if not is_number and not (isinstance(value, float) and math.isfinite(value)):
            found.append(Mistake(path, UNEXPECTED, "true, false or a finite number", value))
        return value

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [{"type": kind} for kind in ("boolean", "integer", "number")]}


class ListOf(Kind):
    """A list: of at least one where there must be ``some``, of just ``count`` where that is given."""

    def __init__(self, element: Kind, some: bool = False, count: int | None = None) -> None:
        self._element = element
        self._some = some
        self._count = count

    def read(self, value: Any, path: Place, found: list[Mistake]) -> Any:
        if not isinstance(value, list):
            found.append(Mistake(path, UNEXPECTED, "a list", value))
            return value
        if self._some and not value:
            found.append(Mistake(path, UNEXPECTED, "at least one entry", value))
        if self._count is not None and len(value) != self._count:
            found.append(Mistake(path, UNEXPECTED, f"a list of {self._count}", value))
        return [self._element.read(one, (*path, index), found) for index, one in enumerate(value)]

    def schema(self) -> dict[str, Any]:
        least = {"minItems": self._count or 1} if self._some or self._count else {}
        most = {"maxItems": self._count} if self._count else {}
        return {"type": "array", "items": self._element.schema(), **least, **most}

    def parts(self) -> list[Kind]:
        return [self._element]


class MappingOf(Kind):
    """A mapping with any keys of a kind, and values of a kind; not empty where there must be ``some``."""

    def __init__(self, key: Kind, value: Kind, some: bool = False) -> None:
        self._key = key
        self.value = value
        self._some = some

    def read(self, value: Any, path: Place, found: list[Mistake]) -> Any:
        if not isinstance(value, Mapping):
            found.append(Mistake(path, UNEXPECTED, "a mapping", value))
            return value
        if self._some and not value:
            found.append(Mistake(path, UNEXPECTED, "at least one entry", value))
        wrong: list[Mistake] = []
        for key in value:
            self._key.read(key, (*path, key), wrong)
        found += [one._replace(at_key=True) for one in wrong]
        return {key: self.value.read(one, (*path, key), found) for key, one in value.items()}

    def schema(self) -> dict[str, Any]:
        keys = {key: one for key, one in self._key.schema().items() if key != "type"}
        return {
            "type": "object",
            "additionalProperties": self.value.schema() or True,
            **({"propertyNames": keys} if keys else {}),
            **({"minProperties": 1} if self._some else {}),
        }

    def parts(self) -> list[Kind]:
        return [self.value]


class Arguments(MappingOf):
    """Arguments of a callable, which travel to a worker as msgpack: integers have 64 bits."""

    def __init__(self) -> None:
        super().__init__(Text(), Kind())

    def read(self, value: Any, path: Place, found: list[Mistake]) -> Any:
        if isinstance(value, Mapping) and (large := _too_large(value)) is not None:
            text = f"expected integers of at most 64 bits, given {large}"
            found.append(Mistake(path, WRONG, text))
        return super().read(value, path, found)


def _too_large(value: Any) -> int | None:
    """The first integer in it that has more than 64 bits."""
    if isinstance(value, int):
        return None if value in WIRE_INTEGERS else value
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return next((large for one in inside if (large := _too_large(one)) is not None), None)


class OrNull(Kind):
    """A value of a kind, or null."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind

    def read(self, value: Any, path: Place, found: list[Mistake]) -> Any:
        return None if value is None else self.kind.read(value, path, found)

    def schema(self) -> dict[str, Any]:
        return {"anyOf": [self.kind.schema(), {"type": "null"}]}

    def parts(self) -> list[Kind]:
        return [self.kind]
