"""What an option is: a field of a frozen dataclass that also carries its description and its bounds.

Such a dataclass is a table, and each of its fields a row. From the rows come the keys of the config file with
their JSON schema and checks, what a program or a client may say, Triton's model configuration, and the lines
of docs/reference.md. No option is named here: see ``declare/spec.py`` and ``settings/server.py``.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import operator
import types
import typing
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from gpuserve.options import durations

_Value = TypeVar("_Value")
_Table = TypeVar("_Table")
_KEY: Final = "option"
#: The integers that a message between processes can hold.
WIRE_INTEGERS: Final = range(-(2**63), 2**64)


@dataclass(frozen=True, slots=True)
class Option:
    """What a row says besides the name, the type and the default of its field.

    ``least`` and ``most`` bound a number, or each element of a list. ``some``: a text or a list must not be
    empty. ``words`` are the texts that there are, or of a number, whose value ``read`` says. ``triton`` is
    the name in Triton's model configuration and in PyTriton, where it has one; files may have either name.
    ``nullable``: None, in a file null, stands for the default. ``read`` turns what is given into a text, or a
    word into its number, or raises ValueError. A ``secret`` is never printed. Who writes a file must say a
    ``needed`` one, even where the field has a default. ``live`` says what a new value is for, where it may
    change while a server runs. ``examples`` are for editors. ``unit`` comes of the name, where the option is
    a length of time.
    """

    description: str
    least: float | None = None
    most: float | None = None
    some: bool = False
    words: tuple[str, ...] = ()
    triton: str = ""
    nullable: bool = False
    read: Callable[[Any], Any] | None = None
    secret: bool = False
    needed: bool = False
    live: str = ""
    examples: tuple[Any, ...] = ()
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """One option with its field. ``hint`` is the type, without None; ``default`` is ``REQUIRED`` for none.

    ``has_none``: None is a value of its own.
    """

    name: str
    hint: Any
    has_none: bool
    default: Any
    option: Option


REQUIRED: Final = dataclasses.MISSING


def option(default: _Value, description: str, **more: Any) -> _Value:
    """A field with a default that is an option; ``more`` is what ``Option`` has besides."""
    metadata = {_KEY: Option(description, **more)}
    secret = bool(more.get("secret"))
    if isinstance(default, dict):
        made: Any = field(default_factory=default.copy, metadata=metadata)
    else:
        made = field(default=default, repr=not secret, metadata=metadata)
    return typing.cast(_Value, made)


def required(description: str, **more: Any) -> Any:
    """A field without a default that is an option."""
    return field(repr=not more.get("secret"), metadata={_KEY: Option(description, **more)})


def rows(table: type) -> dict[str, Row]:
    """The options of a table by name, in the order of their fields."""
    return _rows(table)


@functools.cache
def _rows(table: Hashable) -> dict[str, Row]:
    assert isinstance(table, type)
    assert dataclasses.is_dataclass(table)
    hints = typing.get_type_hints(table)
    return {one.name: _row(one, hints[one.name]) for one in dataclasses.fields(table) if _KEY in one.metadata}


def _row(one: dataclasses.Field[Any], hint: Any) -> Row:
    bare, has_none = without_none(hint)
    if typing.get_origin(bare) is typing.Literal:  # for type checkers; the words are the option's own
        bare = str
    said: Option = one.metadata[_KEY]
    if unit := durations.unit_of(one.name, bare):
        said = dataclasses.replace(said, unit=unit)
    return Row(one.name, bare, has_none, _default(one), said)


def without_none(hint: Any) -> tuple[Any, bool]:
    if typing.get_origin(hint) in {types.UnionType, typing.Union}:
        return next(one for one in typing.get_args(hint) if one is not type(None)), True
    return hint, False


def _default(one: dataclasses.Field[Any]) -> Any:
    if one.metadata[_KEY].needed:
        return REQUIRED
    return one.default_factory() if one.default_factory is not dataclasses.MISSING else one.default


def element(hint: Any) -> Any:
    args = typing.get_args(hint)
    is_list = typing.get_origin(hint) is Sequence or (
        typing.get_origin(hint) is tuple and args[-1] is Ellipsis
    )
    return args[0] if is_list else None


def key_and_value(hint: Any) -> tuple[Any, Any] | None:
    """The types of a mapping, which a table may have as a tuple of pairs; None where it is none."""
    pair = hint if typing.get_origin(hint) is Mapping else element(hint)
    if pair is hint or typing.get_origin(pair) is tuple:
        key, value = typing.get_args(pair)
        return key, value
    return None


def spelled(table: Any) -> Any:
    """A table whose options have Triton's names too, in its constructor and as attributes; a decorator."""
    options = [(one.name, one.metadata[_KEY]) for one in dataclasses.fields(table) if _KEY in one.metadata]
    own = {said.triton: name for name, said in options}
    make = table.__init__

    @functools.wraps(make)
    def init(self: Any, *values: Any, **named: Any) -> None:
        usual = {own.get(name, name): one for name, one in named.items()}
        if len(usual) < len(named):
            raise TypeError(f"an option of {table.__name__} is given by both of its names")
        make(self, *values, **usual)

    table.__init__ = init
    for theirs, name in own.items():
        if theirs not in {"", name}:
            setattr(table, theirs, _other_name(name))
    return table


def _other_name(name: str) -> property:
    def change(self: Any, value: Any) -> None:
        setattr(self, name, value)

    return property(operator.attrgetter(name), change)


@typing.dataclass_transform(kw_only_default=True)
def by_keyword(table: type[_Table]) -> type[_Table]:
    """A table with which ``changeable`` may be called. Type checkers are not told that it is frozen: to them
    it is the base of the class that may be changed as well.
    """
    return dataclass(frozen=True, slots=True, kw_only=True)(table)


def changeable(table: type) -> Any:
    """A class whose objects have the options of a table, all by keyword, and may be changed."""
    made = [
        (one.name, one.type, field(default=None if one.metadata[_KEY].nullable else one.default))
        for one in dataclasses.fields(table)
    ]
    return dataclasses.make_dataclass(table.__name__, made, kw_only=True)


# ---- from what a program, a file or a client says to a table ------------------------------------


def declared(
    table: type[_Table],
    given: Any,
    where: str = "",
    written: Mapping[type, type] | None = None,
) -> _Table:
    """A table with the values of an object or a mapping, each of which is checked.

    Lists become tuples, mappings tuples of pairs, and objects tables. What ``given`` has besides is passed
    over: one object may fill several tables.

    Args:
        where: what to put before the name of an option in a message.
        written: the classes by which programs write tables, where they are others.

    Raises:
        ValueError: a value cannot be; the text names the option as ``given`` does.
    """
    written = written or {}
    values = _values(table, given, where, written)
    made: dict[str, Any] = {}
    for name, row in rows(table).items():
        for spelled in (name, row.option.triton):
            if spelled and spelled in values:
                made[name] = checked(row, values[spelled], f"{where}{spelled}", written)
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
        raise ValueError(f"{where.rstrip('.')} must be a {wanted.__name__}, got {_kind(given)}")
    fields = dataclasses.fields(given)  # type: ignore[arg-type]  # a table is a dataclass
    return {one.name: getattr(given, one.name) for one in fields}


def checked(row: Row, value: Any, name: str, written: Mapping[type, type] | None = None) -> Any:
    """The value of an option as its table has it. Raises ValueError: it cannot be."""
    if value is None and row.has_none:
        return None
    if value is None and (row.option.nullable or dataclasses.is_dataclass(type(row.default))):
        return row.default
    return _checked(row.hint, row.option, value, name, written or {})


def _checked(hint: Any, said: Option, value: Any, name: str, written: Mapping[type, type]) -> Any:
    if dataclasses.is_dataclass(hint):
        table = typing.cast(type, hint)
        if written and isinstance(value, Mapping):  # a program writes objects
            raise ValueError(f"{name} must be a {written.get(table, table).__name__}, got {_kind(value)}")
        return declared(table, value, f"{name}.", written)
    if (pair := key_and_value(hint)) is not None:
        return tuple(_pairs(pair, said, value, name, written))
    if (kind := element(hint)) is not None:
        return _elements(kind, said, value, name, written)
    if hint in _SCALARS:
        if said.unit and isinstance(value, str):
            value = _duration(said.unit, name, value)
        return _SCALARS[hint](said, name, value)
    return _text(said, name, value) if said.read is not None else value


def _elements(
    kind: Any, said: Option, value: Any, name: str, written: Mapping[type, type]
) -> tuple[Any, ...]:
    if value is None and written:  # PyTriton's way to say that there are none
        value = ()
    some = "non-empty " if said.some else ""
    shown = "something else" if said.secret else f"{value!r:.200}"
    wanted = f"{name} must be a {some}list of {_listed(kind, said, written)}, got {shown}"
    if not isinstance(value, Sequence) or isinstance(value, str) or (said.some and not value):
        raise ValueError(wanted)
    if dataclasses.is_dataclass(kind):
        return tuple(
            _checked(kind, said, one, f"{name}[{index}]", written) for index, one in enumerate(value)
        )
    try:
        return tuple(_checked(kind, said, one, name, written) for one in value)
    except ValueError:
        if said.read is not None:  # it says what is wrong with one of them
            raise
        raise ValueError(wanted) from None


def _pairs(
    kinds: tuple[Any, Any], said: Option, value: Any, name: str, written: Mapping[type, type]
) -> Iterator[tuple[Any, Any]]:
    key_kind, kind = kinds
    if isinstance(value, tuple):  # as a table has it
        value = dict(value)
    if value is None:
        value = {}
    if not isinstance(value, Mapping) or (said.some and not value):
        some = "non-empty " if said.some else ""
        raise ValueError(f"{name} must be a {some}mapping, got {value!r:.200}")
    pairs = [(_key(key_kind, key, name, bool(written)), one) for key, one in value.items()]
    for key, one in sorted(pairs, key=lambda pair: pair[0]) if key_kind is int else pairs:
        yield key, _checked(kind, Option("", some=True), one, f"{name}[{key}]", written)


def _key(kind: Any, key: Any, name: str, by_program: bool) -> Any:
    if kind is int and isinstance(key, str) and not by_program:  # a file has texts as keys
        return int(key)
    if not isinstance(key, kind) or isinstance(key, bool) or not key:
        wanted = "integers of at least 1" if kind is int else "non-empty strings"
        raise ValueError(f"the keys of {name} must be {wanted}, got {key!r}")
    return key


def _duration(unit: str, name: str, text: str) -> float:
    try:
        return durations.whole(durations.duration(text, unit), unit)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{name}: {error}") from None


def _listed(kind: Any, said: Option, written: Mapping[type, type]) -> str:
    if dataclasses.is_dataclass(kind):
        return written.get(typing.cast(type, kind), typing.cast(type, kind)).__name__
    if said.words:
        return f"any of {', '.join(map(repr, said.words))}"
    return f"{'integers' if kind is int else 'strings'}{_bounds(said)}"


def integer(name: str, value: Any, least: float | None = 0, most: float | None = None) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or (least is not None and value < least):
        raise ValueError(f"{name} must be an integer{_bounds(Option('', least))}, got {_given(value)}")
    if most is not None and value > most:
        raise ValueError(f"{name} must be at most {most}, got {_given(value)}")
    if value not in WIRE_INTEGERS:
        raise ValueError(f"{name} must be an integer of at most 64 bits, got {_given(value)}")
    return value


def _given(value: Any) -> str:
    """Show a value; an integer of thousands of digits, which Python refuses to print, by its size."""
    try:
        return f"{value!r:.200}"
    except ValueError:
        return f"an integer of {value.bit_length()} bits"


def _integer(said: Option, name: str, value: Any) -> int:
    known = value if said.read is None else said.read(value)
    if isinstance(known, str) and said.words:
        words = " or ".join(map(repr, said.words))
        raise ValueError(f"{name} must be {words} or an integer{_bounds(said)}, got {value!r:.200}")
    return integer(name, known, said.least, said.most)


def boolean(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")
    return value


def number(name: str, value: Any, least: float | None = None, most: float | None = None) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (least is not None and value < least) or (most is not None and value > most):
        raise ValueError(f"{name} must be a number{_bounds(Option('', least, most))}, got {_given(value)}")
    if isinstance(value, int) and value not in WIRE_INTEGERS:
        raise ValueError(f"{name} must be a number of at most 64 bits, got {_given(value)}")
    if not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value!r}")
    return float(value)


def _text(said: Option, name: str, value: Any) -> str:
    if said.read is not None:
        try:
            value = said.read(value)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    if isinstance(value, enum.Enum):  # PyTriton's TimeoutAction
        value = str(value.value).lower()
    if said.words and value not in said.words:
        words = " or ".join(map(repr, said.words))
        if said.nullable or len(said.words) != 2:
            words = f"one of {', '.join(map(repr, said.words))}{' or None' if said.nullable else ''}"
        raise ValueError(f"{name} must be {words}, got {value!r:.200}")
    if not isinstance(value, str) or (said.some and not value):
        raise ValueError(f"{name} must be a {'non-empty ' if said.some else ''}string, got {value!r:.200}")
    return value


_SCALARS: Final[dict[Any, Callable[[Option, str, Any], Any]]] = {
    int: _integer,
    float: lambda said, name, value: number(name, value, said.least, said.most),
    bool: lambda _, name, value: boolean(name, value),
    str: _text,
}


def _bounds(said: Option) -> str:
    if said.least is not None and said.most is not None:
        return f" from {said.least} to {said.most}"
    return "" if said.least is None else f" of at least {said.least}"


def _kind(value: Any) -> str:
    return f"an object of type {type(value).__name__}"


def nearest(word: str, known: Iterable[str]) -> str:
    """``; did you mean '…'?`` with the known word most like this one, "" where none is."""
    import difflib

    folded = {candidate.casefold(): candidate for candidate in known}
    close = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.5)
    return f"; did you mean {folded[close[0]]!r}?" if close else ""


# ---- between processes --------------------------------------------------------------------------


def rebuilt(kind: Any, plain: Any) -> Any:
    """A value of that type, of the plain data that ``dataclasses.astuple`` made of one in another process.
    Raises ValueError, TypeError: there are not as many values as a table or a tuple has.
    """
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind).values()
        make: Any = kind
        return make(*(rebuilt(hint, one) for hint, one in zip(hints, plain, strict=True)))
    if (each := element(kind)) is not None:
        return tuple(rebuilt(each, one) for one in plain)
    if typing.get_origin(kind) is tuple:
        return tuple(rebuilt(hint, one) for hint, one in zip(typing.get_args(kind), plain, strict=True))
    return kind(*plain) if hasattr(kind, "_fields") else plain
