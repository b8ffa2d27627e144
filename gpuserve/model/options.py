"""Option tables: frozen dataclasses whose fields carry a description and bounds besides type and default.

Each field of a table is an option. From the options come the keys of the config file with JSON schema and
checks, the arguments that programs and clients may pass, Triton's model configuration, and the lines of
docs/reference.md. This module names no option: see ``model/spec.py`` and ``config/settings/server.py``.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import operator
import re
import types
import typing
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

_Value = TypeVar("_Value")
_Table = TypeVar("_Table")
_KEY: Final = "option"
#: The integers that a message between processes can hold.
WIRE_INTEGERS: Final = range(-(2**63), 2**64)


@dataclass(frozen=True, slots=True)
class Option:
    """The description and the bounds of an option.

    Attributes:
        description: A sentence for docs/reference.md, the JSON schema and the help of the command line.
        least: Lower bound of a number, or of each element of a list.
        most: Upper bound of a number, or of each element of a list.
        some: Whether a text or a list must not be empty.
        words: The texts that the option can have. For a number: words that stand for numbers, by ``read``.
        triton: The option's name in Triton's model configuration and in PyTriton, if it has one. Files may
            use either name.
        former: An earlier name of the option, which stays accepted.
        nullable: Whether None (in a file: null) stands for the default.
        read: A function that turns a value into a text, or a word into its number, or raises ValueError.
        secret: Whether the value is never printed.
        needed: Whether a file must give the option even if the field has a default.
        live: The objects that a new value applies to, if the option may change while a server runs.
        examples: Examples for editors.
        unit: The unit of a duration or a size, derived from the name of the option unless given; "" for all
            other options.
    """

    description: str
    least: float | None = None
    most: float | None = None
    some: bool = False
    words: tuple[str, ...] = ()
    triton: str = ""
    former: str = ""
    nullable: bool = False
    read: Callable[[Any], Any] | None = None
    secret: bool = False
    needed: bool = False
    live: str = ""
    examples: tuple[Any, ...] = ()
    unit: str = ""


@dataclass(frozen=True, slots=True)
class OptionRow:
    """An option with its field; ``hint`` without None, ``default`` or ``REQUIRED``; ``has_none``: a value."""

    name: str
    hint: Any
    has_none: bool
    default: Any
    option: Option


REQUIRED: Final = dataclasses.MISSING


def option(default: _Value, description: str, **more: Any) -> _Value:
    """Return a dataclass field that is an option with a default; ``more`` are attributes of ``Option``."""
    metadata = {_KEY: Option(description, **more)}
    secret = bool(more.get("secret"))
    if isinstance(default, dict):
        made: Any = field(default_factory=default.copy, metadata=metadata)
    else:
        made = field(default=default, repr=not secret, metadata=metadata)
    return typing.cast(_Value, made)


def required(description: str, **more: Any) -> Any:
    """Return a dataclass field that is an option without a default."""
    return field(repr=not more.get("secret"), metadata={_KEY: Option(description, **more)})


def rows(table: type) -> dict[str, OptionRow]:
    """Return the options of a table by name, in the order of the fields."""
    return _rows(table)


@functools.cache
def _rows(table: Hashable) -> dict[str, OptionRow]:
    assert isinstance(table, type)
    assert dataclasses.is_dataclass(table)
    hints = typing.get_type_hints(table)
    return {one.name: _row(one, hints[one.name]) for one in dataclasses.fields(table) if _KEY in one.metadata}


def _row(one: dataclasses.Field[Any], hint: Any) -> OptionRow:
    bare, has_none = hint, typing.get_origin(hint) in {types.UnionType, typing.Union}
    if has_none:
        bare = next(one for one in typing.get_args(hint) if one is not type(None))
    if typing.get_origin(bare) is typing.Literal:  # for type checkers; the option has its own words
        bare = str
    found: Option = one.metadata[_KEY]
    for unit in _UNITS.get(bare, ()):
        if one.name.endswith(f"_{unit}"):
            found = dataclasses.replace(found, unit=unit)
    default: Any = one.default
    if found.needed:
        default = REQUIRED
    elif one.default_factory is not dataclasses.MISSING:
        default = one.default_factory()
    return OptionRow(one.name, bare, has_none, default, found)


def element(hint: Any) -> Any:
    """Return the type of the elements of a list type, or None for any other type."""
    args = typing.get_args(hint)
    is_list = typing.get_origin(hint) is Sequence or (
        typing.get_origin(hint) is tuple and args[-1] is Ellipsis
    )
    return args[0] if is_list else None


def key_and_value(hint: Any) -> tuple[Any, Any] | None:
    """Return key and value type of a mapping, which a table may hold as pairs; None for any other type."""
    pair = hint if typing.get_origin(hint) is Mapping else element(hint)
    if pair is hint or typing.get_origin(pair) is tuple:
        key, value = typing.get_args(pair)
        return key, value
    return None


def other_names(table: Any) -> dict[str, str]:
    """Return the other names of a table's options, Triton's and former ones, with the names of the table."""
    options = [(one.name, one.metadata[_KEY]) for one in dataclasses.fields(table) if _KEY in one.metadata]
    pairs = [(other, name) for name, found in options for other in (found.triton, found.former)]
    return {other: name for other, name in pairs if other not in {"", name}}


def by_own_names(table: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values by the table's names of its options. Raise TypeError if one is given by two names."""
    own = other_names(table)
    usual = {own.get(name, name): one for name, one in values.items()}
    if len(usual) < len(values):
        raise TypeError(f"an option of {table.__name__} is given by both of its names")
    return usual


def spelled(table: Any) -> Any:
    """Accept the other names of a table's options too, in the constructor and as attributes; a decorator."""
    make = table.__init__

    @functools.wraps(make)
    def init(self: Any, *values: Any, **named: Any) -> None:
        make(self, *values, **by_own_names(table, named))

    table.__init__ = init
    for other, name in other_names(table).items():
        change = functools.partial(lambda name, self, value: setattr(self, name, value), name)
        setattr(table, other, property(operator.attrgetter(name), change))
    return table


@typing.dataclass_transform(kw_only_default=True)
def by_keyword(table: type[_Table]) -> type[_Table]:
    """Make a frozen keyword-only dataclass that type checkers regard as mutable, as a config is."""
    return dataclass(frozen=True, slots=True, kw_only=True)(table)


def mutable_options(table: type) -> Any:
    made = [
        (one.name, one.type, field(default=None if one.metadata[_KEY].nullable else one.default))
        for one in dataclasses.fields(table)
    ]
    return dataclasses.make_dataclass(table.__name__, made, kw_only=True)


# ---- the value of one option --------------------------------------------------------------------


class UnfitValue(ValueError):
    """A value that a scalar option cannot have. ``expected`` names the values that it can have."""

    def __init__(self, expected: str) -> None:
        super().__init__(f"expected {expected}")
        self.expected = expected


def fitted(hint: Any, option: Option, value: Any) -> Any:
    """Return the value of a scalar option in the form of the table: the one check for programs and files.
    Raise UnfitValue, or ValueError with a whole sentence if the option's reader refuses the value.
    """
    if hint is bool:
        if not isinstance(value, bool):
            raise UnfitValue("true or false")
        return value
    return _fitted_number(hint, option, value) if hint in {int, float} else _fitted_text(hint, option, value)


def _fitted_number(hint: Any, option: Option, value: Any) -> float | int:
    noun, kinds = ("a number", int | float) if hint is float else ("an integer", int)
    expected = noun + bounds(option) + (f" or {listed_words(option.words)}" if option.words else "")
    if option.words and option.read is not None:
        if isinstance(value, str) and value not in option.words:
            raise UnfitValue(expected)
        value = option.read(value)
    elif option.unit and isinstance(value, str):
        try:
            value = parse_quantity(value, option.unit)
        except (ValueError, OverflowError):
            raise UnfitValue(_EXPECTED[option.unit]) from None
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise UnfitValue(expected)
    if isinstance(value, float) and not math.isfinite(value):
        raise UnfitValue("a finite number")
    if (option.least is not None and value < option.least) or (
        option.most is not None and value > option.most
    ):
        raise UnfitValue(expected)
    if isinstance(value, int) and value not in WIRE_INTEGERS:
        raise UnfitValue(f"{noun} of at most 64 bits")
    return float(value) if hint is float else value


def _fitted_text(hint: Any, option: Option, value: Any) -> str:
    if hint is str and not option.words and not isinstance(value, str):
        raise UnfitValue("a non-empty string" if option.some else "a string")
    if option.read is not None:
        value = option.read(value)
    if isinstance(value, enum.Enum):  # PyTriton's TimeoutAction
        value = str(value.value).lower()
    if option.words and value not in option.words:
        raise UnfitValue(("one of " if len(option.words) > 1 else "") + listed_words(option.words))
    if not isinstance(value, str) or (option.some and not value):
        raise UnfitValue("a non-empty string" if option.some else "a string")
    return value


def bounds(option: Option) -> str:
    """Return the bounds of a number as the end of a sentence, such as " of at least 1"; "" without bounds."""
    if option.least is not None and option.most is not None:
        return f" from {option.least} to {option.most}"
    if option.least is not None:
        return f" of at least {option.least}"
    return "" if option.most is None else f" of at most {option.most}"


def listed_words(words: Sequence[str]) -> str:
    *first, last = map(repr, words)
    return f"{', '.join(first)} or {last}" if first else last


def integer(name: str, value: Any, least: float | None = 0, most: float | None = None) -> int:
    """Return the value if it is an integer within the bounds; raise ValueError otherwise."""
    return int(_scalar(int, Option("", least, most), value, name))


def boolean(name: str, value: Any) -> bool:
    """Return the value if it is True or False; raise ValueError otherwise."""
    return bool(_scalar(bool, Option(""), value, name))


def _scalar(hint: Any, option: Option, value: Any, name: str) -> Any:
    try:
        return fitted(hint, option, value)
    except UnfitValue as error:
        try:
            given = f"{value!r:.200}"
        except ValueError:  # Python refuses to print integers of thousands of digits
            given = f"an integer of {value.bit_length()} bits"
        shown = "" if option.secret else f", got {given}"
        raise ValueError(f"{name} must be {error.expected}{shown}") from None
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


# ---- from the objects of a program, a file or a client to a table --------------------------------


def declared(
    table: type[_Table], given: Any, where: str = "", written: Mapping[type, type] | None = None
) -> _Table:
    """Return a table with the checked values of an object or a mapping; raise ValueError, which names the
    option as ``given`` does after ``where``. Lists become tuples, mappings tuples of pairs, and objects
    tables. Other keys of ``given`` are ignored: one object may fill several tables. ``written`` are the
    classes that programs write in place of tables.
    """
    written = written or {}
    values = _values(table, given, where, written)
    made: dict[str, Any] = {}
    for name, row in rows(table).items():
        for spelling in (name, row.option.triton, row.option.former):
            if spelling and spelling in values:
                made[name] = checked(row, values[spelling], f"{where}{spelling}", written)
                break
        else:
            if row.default is REQUIRED:
                raise ValueError(f"{where}{name} is missing")
    return table(**made)


def _values(table: type, given: Any, where: str, written: Mapping[type, type]) -> Mapping[str, Any]:
    if isinstance(given, Mapping):
        return given
    wanted = written.get(table, table)
    if not isinstance(given, wanted | table):
        raise ValueError(f"{where.rstrip('.')} must be a {_public_name(wanted)}, got {_type_of(given)}")
    fields = dataclasses.fields(given)  # type: ignore[arg-type]  # a table is a dataclass
    return {one.name: getattr(given, one.name) for one in fields}


def checked(row: OptionRow, value: Any, name: str, written: Mapping[type, type] | None = None) -> Any:
    """Return the value of an option in the form of its table; raise ValueError if it is refused."""
    if value is None and row.has_none:
        return None
    if value is None and (row.option.nullable or dataclasses.is_dataclass(type(row.default))):
        return row.default
    return _checked(row.hint, row.option, value, name, written or {})


def _checked(hint: Any, option: Option, value: Any, name: str, written: Mapping[type, type]) -> Any:
    if dataclasses.is_dataclass(hint):
        table = typing.cast(type, hint)
        if written and isinstance(value, Mapping):  # a program writes objects
            wanted = _public_name(written.get(table, table))
            raise ValueError(f"{name} must be a {wanted}, got {_type_of(value)}")
        return declared(table, value, f"{name}.", written)
    if (pair := key_and_value(hint)) is not None:
        return tuple(_pairs(pair, option, value, name, written))
    if (kind := element(hint)) is not None:
        return _elements(kind, option, value, name, written)
    if hint in {bool, int, float, str} or option.read is not None:
        return _scalar(hint, option, value, name)
    return value


def _elements(
    kind: Any, option: Option, value: Any, name: str, written: Mapping[type, type]
) -> tuple[Any, ...]:
    if value is None and written:  # PyTriton writes None for an empty list
        value = ()
    some = "non-empty " if option.some else ""
    shown = "something else" if option.secret else f"{value!r:.200}"
    wanted = f"{name} must be a {some}list of {_listed(kind, option, written)}, got {shown}"
    if not isinstance(value, Sequence) or isinstance(value, str) or (option.some and not value):
        raise ValueError(wanted)
    if dataclasses.is_dataclass(kind):
        return tuple(
            _checked(kind, option, one, f"{name}[{index}]", written) for index, one in enumerate(value)
        )
    try:
        return tuple(_checked(kind, option, one, name, written) for one in value)
    except ValueError:
        if option.read is not None:  # its text says what is wrong with one element
            raise
        raise ValueError(wanted) from None


def _pairs(
    kinds: tuple[Any, Any], option: Option, value: Any, name: str, written: Mapping[type, type]
) -> Iterator[tuple[Any, Any]]:
    key_kind, kind = kinds
    if isinstance(value, tuple):  # the form of a table
        value = dict(value)
    if value is None:
        value = {}
    if not isinstance(value, Mapping) or (option.some and not value):
        some = "non-empty " if option.some else ""
        raise ValueError(f"{name} must be a {some}mapping, got {value!r:.200}")
    pairs = []
    for key, one in value.items():
        known = int(key) if key_kind is int and isinstance(key, str) and not written else key  # of a file
        if not isinstance(known, key_kind) or isinstance(known, bool) or not known:
            wanted = "integers of at least 1" if key_kind is int else "non-empty strings"
            raise ValueError(f"the keys of {name} must be {wanted}, got {key!r}")
        pairs.append((known, one))
    for key, one in sorted(pairs, key=lambda pair: pair[0]) if key_kind is int else pairs:
        yield key, _checked(kind, Option("", some=True), one, f"{name}[{key}]", written)


def _listed(kind: Any, option: Option, written: Mapping[type, type]) -> str:
    if dataclasses.is_dataclass(kind):
        return _public_name(written.get(typing.cast(type, kind), typing.cast(type, kind)))
    if option.words:
        return f"any of {', '.join(map(repr, option.words))}"
    return f"{'integers' if kind is int else 'strings'}{bounds(option)}"


def _public_name(table: type) -> str:
    """Return the name by which programs import a table: ``Queue`` is ``QueueSpec``."""
    return table.__name__.removesuffix("Spec")


def _type_of(value: Any) -> str:
    return f"an object of type {type(value).__name__}"


def from_plain(kind: Any, plain: Any) -> Any:
    """Return a value of a type from its ``dataclasses.astuple``; raise ValueError or TypeError for others."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind).values()
        make: Any = kind
        return make(*(from_plain(hint, one) for hint, one in zip(hints, plain, strict=True)))
    if (each := element(kind)) is not None:
        return tuple(from_plain(each, one) for one in plain)
    if typing.get_origin(kind) is tuple:
        return tuple(from_plain(hint, one) for hint, one in zip(typing.get_args(kind), plain, strict=True))
    return kind(*plain) if hasattr(kind, "_fields") else plain


# ---- durations and sizes: ``10s``, ``1m30s``, ``500ms``, ``20GiB``, or a number in the option's unit ----

SECONDS: Final = "s"
MICROSECONDS: Final = "us"
NBYTES: Final = "nbytes"
_UNITS: Final[dict[Any, tuple[str, ...]]] = {float: (SECONDS,), int: (MICROSECONDS, NBYTES)}
_MICROSECONDS_OF: Final = {
    "us": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "min": 60_000_000,
    "m": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
}
_BYTES_OF: Final[dict[str, int]] = {
    "B": 1,
    **{f"{prefix}B": 1000**power for power, prefix in enumerate("kMGT", 1)},
    **{f"{prefix}iB": 1024**power for power, prefix in enumerate("KMGT", 1)},
}
_NUMBER: Final = r"[0-9]+(?:\.[0-9]+)?"
_DURATION_PART: Final = rf"{_NUMBER} ?(?:{'|'.join(_MICROSECONDS_OF)})"
_DURATION_FORM: Final = rf"{_NUMBER}|{_DURATION_PART}(?: ?{_DURATION_PART})*"
_SIZE: Final = re.compile(rf"({_NUMBER}) ?({'|'.join(_BYTES_OF)})?")
#: The texts that ``parse_duration`` reads, for JSON Schema.
DURATION_PATTERN: Final = f"^(?:{_DURATION_FORM})$"
_SIZE_PATTERN: Final = f"^{_SIZE.pattern}$"


def parse_quantity(text: str, unit: str) -> float | int:
    """Return a duration or a size in the unit of an option; raise ValueError for other texts."""
    if unit != NBYTES:
        duration = parse_duration(text, unit)
        return round(duration) if unit == MICROSECONDS else duration
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"expected {_EXPECTED[unit]}, given {text!r:.80}")
    return round(float(found[1]) * _BYTES_OF[found[2] or "B"])


def quantity_pattern(unit: str) -> str:
    """Return the pattern of the texts that ``parse_quantity`` reads, for JSON Schema."""
    return _SIZE_PATTERN if unit == NBYTES else DURATION_PATTERN


def parse_duration(text: str, unit: str = SECONDS) -> float:
    """Return a duration in the unit, which numbers have already; raise ValueError with the expected form."""
    if re.fullmatch(_DURATION_FORM, text) is None:
        raise ValueError(f"expected {_EXPECTED[unit]}, given {text!r:.80}")
    parts = re.findall(rf"({_NUMBER}) ?([a-z]*)", text)
    microseconds = sum(float(count) * _MICROSECONDS_OF[of or unit] for count, of in parts)
    return microseconds / _MICROSECONDS_OF[unit]


_EXPECTED: Final = {
    NBYTES: "a whole number of bytes or a size such as 500MB or 20GiB",
    MICROSECONDS: "a whole number of microseconds or a time such as 500us or 2ms",
    SECONDS: "a number of seconds or a time such as 500ms, 10s, 1m30s or 2h",
}
