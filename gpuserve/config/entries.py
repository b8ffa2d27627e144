"""The mappings of a config file, derived from option tables: one class a mapping, one ``Kind`` a value. A
kind reads a value, collects mistakes with their places, and describes its values as JSON Schema. Scalars are
checked by ``model/options.py``, as they are for programs.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

from gpuserve.backends.registry import is_model_path
from gpuserve.core.errors import BindError
from gpuserve.core.suggestions import nearest
from gpuserve.devices.names import TOGETHER, check_device_name, likely_device_name
from gpuserve.model.options import (
    REQUIRED,
    WIRE_INTEGERS,
    Option,
    OptionRow,
    UnfitValue,
    element,
    fitted,
    key_and_value,
    other_names,
    quantity_pattern,
    rows,
)
from gpuserve.model.spec import check_model_name
from gpuserve_worker.protocol.tensor import ITEMSIZE, datatype_of

#: Keys and list positions from the root to a value.
Place: TypeAlias = tuple[str | int, ...]
#: Kinds of mistakes; WRONG: the reader of a value refused it.
UNKNOWN: Final = "unknown"
MISSING: Final = "missing"
UNEXPECTED: Final = "unexpected"
WRONG: Final = "wrong"

_CALLABLE: Final = re.compile(
    r"(?P<place>[^:]+\.py|[A-Za-z_][\w]*(\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)"
)
DTYPE_WORDS: Final = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "bytes"),
    *ITEMSIZE,
)


class Mistake(NamedTuple):
    """A mistake at a place. ``text`` names the expected values; for ``WRONG`` it is the whole sentence."""

    path: Place
    kind: str
    text: str = ""
    given: Any = None
    #: For ``UNKNOWN``: the known keys, and those of mappings below them.
    known: tuple[str, ...] = ()
    nested: tuple[str, ...] = ()
    #: Whether the mistake is in the key and not in its value.
    at_key: bool = False


class Kind:
    """A kind of values; this class itself stands for any value. ``inner`` is the kind of contained values."""

    inner: Kind | None = None

    def read(self, value: Any, path: Place, found: list[Mistake]) -> Any:
        """Return the value in the form of the entry; append its mistakes to ``found``."""
        return value

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema of the values; other mappings are named by ``$ref``."""
        return {}


class Scalar(Kind):
    """A text, number, duration or flag, checked by ``options.fitted``."""

    def __init__(self, hint: Any, option: Option) -> None:
        self.hint = hint
        self.option = option

    @property
    def is_text(self) -> bool:
        return self.hint not in {bool, int, float}

    def read(self, value: Any, path: Place, found: list[Mistake]) -> Any:
        try:
            return fitted(self.hint, self.option, value)
        except UnfitValue as error:
            found.append(Mistake(path, UNEXPECTED, error.expected, value))
        except ValueError as error:
            found.append(Mistake(path, WRONG, str(error)))
        return value

    def schema(self) -> dict[str, Any]:
        option = self.option
        if self.hint is bool:
            return {"type": "boolean"}
        words = {"enum": list(option.words)} if option.words else {}
        if self.is_text:
            return {"type": "string", **words, **({"minLength": 1} if option.some and not words else {})}
        limits = {"minimum": option.least, "maximum": option.most}
        number = {
            "type": "number" if self.hint is float else "integer",
            **{key: one for key, one in limits.items() if one is not None},
        }
        if words:
            return {"anyOf": [number, {"type": "string", **words}]}
        if option.unit:
            return {"anyOf": [number, {"type": "string", "pattern": quantity_pattern(option.unit)}]}
        return number


class DeviceNames(Scalar):
    """A device, or a list of the GPUs that a process uses together."""

    def read(self, value: Any, path: Place, found: list[Mistake]) -> Any:
        names = value if isinstance(value, list) else [value]
        if not names or not all(isinstance(one, str) for one in names):
            found.append(Mistake(path, UNEXPECTED, "the name of a device, or a list of names of GPUs", value))
            return value
        return super().read(TOGETHER.join(names), path, found)

    def schema(self) -> dict[str, Any]:
        one = super().schema()
        return {"anyOf": [one, {"type": "array", "items": one, "minItems": 1}]}


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
    """A list of values of one kind; not empty if ``some``, of exactly ``count`` values if that is given."""

    inner: Kind

    def __init__(self, inner: Kind, some: bool = False, count: int | None = None) -> None:
        self.inner = inner
        self._some = some
        self._count = count

    def read(self, value: Any, path: Place, found: list[Mistake]) -> Any:
        if not isinstance(value, list):
            example = ""
            if isinstance(self.inner, Scalar) and self.inner.is_text and isinstance(value, str):
                example = f", such as {[one.strip() for one in value.split(',')]}"
            found.append(Mistake(path, UNEXPECTED, f"a list{example}", value))
            return value
        if self._some and not value:
            found.append(Mistake(path, UNEXPECTED, "at least one entry", value))
        if self._count is not None and len(value) != self._count:
            found.append(Mistake(path, UNEXPECTED, f"a list of {self._count}", value))
        return [self.inner.read(one, (*path, index), found) for index, one in enumerate(value)]

    def schema(self) -> dict[str, Any]:
        least = {"minItems": self._count or 1} if self._some or self._count else {}
        most = {"maxItems": self._count} if self._count else {}
        return {"type": "array", "items": self.inner.schema(), **least, **most}


class MappingOf(Kind):
    """A mapping with free keys of one kind and values of one kind; not empty if ``some``."""

    inner: Kind

    def __init__(self, key: Kind, inner: Kind, some: bool = False) -> None:
        self._key = key
        self.inner = inner
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
        return {key: self.inner.read(one, (*path, key), found) for key, one in value.items()}

    def schema(self) -> dict[str, Any]:
        keys = {key: one for key, one in self._key.schema().items() if key != "type"}
        return {
            "type": "object",
            "additionalProperties": self.inner.schema() or True,
            **({"propertyNames": keys} if keys else {}),
            **({"minProperties": 1} if self._some else {}),
        }


class Arguments(MappingOf):
    """Arguments of a callable. Workers receive arguments as msgpack, whose integers have 64 bits."""

    def __init__(self) -> None:
        super().__init__(Scalar(str, Option("")), Kind())

    def read(self, value: Any, path: Place, found: list[Mistake]) -> Any:
        if isinstance(value, Mapping) and (large := _too_large(value)) is not None:
            found.append(Mistake(path, WRONG, f"expected integers of at most 64 bits, given {large}"))
        return super().read(value, path, found)


def _too_large(value: Any) -> int | None:
    """Return the first integer of more than 64 bits in plain data, or None."""
    if isinstance(value, int):
        return None if value in WIRE_INTEGERS else value
    inside = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return next((large for one in inside if (large := _too_large(one)) is not None), None)


@dataclasses.dataclass(eq=False)
class Key:
    """A key of a mapping. ``default`` may be ``REQUIRED``; ``make`` returns a new default."""

    kind: Kind
    description: str
    default: Any = dataclasses.field(default_factory=lambda: REQUIRED)
    make: Callable[[], Any] | None = None
    examples: tuple[Any, ...] = ()
    secret: bool = False
    nullable: bool = False

    @property
    def is_required(self) -> bool:
        return self.default is REQUIRED and self.make is None


class Entry:
    """A mapping of the file whose known keys are attributes. ``given`` are the keys that the file has."""

    keys: ClassVar[Mapping[str, Key]] = {}
    #: Triton's and PyTriton's names for keys that have another name here.
    spellings: ClassVar[Mapping[str, str]] = {}
    given: frozenset[str]

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.given = frozenset(values)
        for name, key in self.keys.items():
            default = key.default if key.make is None or name in values else key.make()
            setattr(self, name, values.get(name, default))

    if typing.TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @classmethod
    def read(cls, data: Any, path: Place, found: list[Mistake]) -> Any:
        if not isinstance(data, Mapping):
            found.append(Mistake(path, UNEXPECTED, "a mapping", data))
            return data
        known = tuple(cls.keys)
        values = {}
        for name, one in data.items():
            if (key := cls.keys.get(name)) is None:
                inner = {outer: each.kind for outer, each in cls.keys.items()}
                nested = [
                    f"{outer}{'[]' if isinstance(kind, ListOf) else ''}.{each}"
                    for outer, kind in inner.items()
                    for part in [kind.inner if isinstance(kind, ListOf) else kind]
                    if isinstance(part, EntryOf)
                    for each in part.entry.keys
                ]
                found.append(Mistake((*path, name), UNKNOWN, known=known, nested=tuple(nested), at_key=True))
            else:
                is_null = one is None and key.nullable
                values[name] = None if is_null else key.kind.read(one, (*path, name), found)
        for name, key in cls.keys.items():
            if name not in values and key.is_required:
                found.append(Mistake((*path, name), MISSING))
        return cls(values)

    def plain(self, *, nulls: bool = True) -> dict[str, Any]:
        """Return all values as plain data, defaults included; without ``nulls`` leave out None."""
        values = {name: _plain(getattr(self, name), nulls) for name in self.keys}
        return values if nulls else {name: one for name, one in values.items() if one is not None}

    def __repr__(self) -> str:
        shown = [f"{name}={getattr(self, name)!r}" for name, key in self.keys.items() if not key.secret]
        return f"{type(self).__name__}({', '.join(shown)})"


def _plain(value: Any, nulls: bool) -> Any:
    if isinstance(value, Entry):
        return value.plain(nulls=nulls)
    if isinstance(value, list):
        return [_plain(one, nulls) for one in value]
    if isinstance(value, dict):
        return {key: _plain(one, nulls) for key, one in value.items()}
    return value


class EntryOf(Kind):
    """A mapping that an entry class describes."""

    def __init__(self, entry: type[Entry]) -> None:
        self.entry = entry

    def read(self, value: Any, path: Place, found: list[Mistake]) -> Any:
        return self.entry.read(value, path, found)

    def schema(self) -> dict[str, Any]:
        return {"$ref": f"#/$defs/{self.entry.__name__}"}


@functools.cache
def entry_class_of(table: Any) -> type[Entry]:
    """Return the entry class that an option table stands for."""
    name = re.sub(r"(Spec|Settings)?$", "Entry", table.__name__, count=1)
    content = {"__doc__": inspect.getdoc(table), "keys": keys_of(table), "spellings": spellings_of(table)}
    return type(name, (Entry,), content)


def keys_of(table: Any, *left_out: str) -> dict[str, Key]:
    """Return the keys of an option table, except those that are left out."""
    return {name: _key(row) for name, row in rows(table).items() if name not in left_out}


def spellings_of(table: Any) -> dict[str, str]:
    """Return other names of a table's options that are keys of the same mapping, with our names."""
    return {other: name for other, name in other_names(table).items() if "." not in other}


def _key(row: OptionRow) -> Key:
    option = row.option
    kind = _kind(row.hint, option)
    nullable = (option.nullable or row.has_none) and not option.needed
    default: Any = row.default
    make: Callable[[], Any] | None = None
    if default is not REQUIRED and isinstance(kind, EntryOf) and not nullable:
        make = functools.partial(kind.entry, {})
    elif default is not REQUIRED and key_and_value(row.hint) is not None:
        default, make = {}, dict
    elif isinstance(default, tuple):
        default, make = list(default), functools.partial(list, default)
    elif isinstance(default, dict):
        make = default.copy
    elif option.nullable:
        default = None
    return Key(kind, option.description, default, make, option.examples, option.secret, nullable)


def _kind(hint: Any, option: Option) -> Kind:
    if dataclasses.is_dataclass(hint):
        return EntryOf(entry_class_of(typing.cast(Any, hint)))
    if typing.get_origin(hint) is dict:
        return MappingOf(Scalar(str, Option("")), _kind(typing.get_args(hint)[1], Option("")))
    if (pair := key_and_value(hint)) is not None:
        key = Scalar(str, Option("", read=_level)) if pair[0] is int else FILLED
        some = option.some and typing.get_origin(hint) is tuple
        return MappingOf(key, _kind(pair[1], Option("", some=True)), some)
    if (one := element(hint)) is not None:
        each = dataclasses.replace(option, some=one is str and not option.words)
        return ListOf(_kind(one, each), option.some)
    if typing.get_origin(hint) is tuple:
        return ListOf(FlagOrNumber(), count=2)
    if hint not in {bool, int, float}:  # a text, or a dtype, which a file writes as text
        read = None if option.read is None else _READERS.get(option.read, option.read)
        kind = DeviceNames if option.read is check_device_name else Scalar
        return kind(str, dataclasses.replace(option, some=option.some and hint is str, read=read))
    return Scalar(hint, option)


FILLED: Final = Scalar(str, Option("", some=True))


def read_model_name(name: str) -> str:
    try:
        return check_model_name(name)
    except BindError as error:
        raise ValueError(str(error)) from None


def split_callable(path: str) -> tuple[str, str]:
    """Return ``linear.py:Linear`` as ("linear.py", "Linear"); raise ValueError for any other form."""
    found = _CALLABLE.fullmatch(path)
    if found is None:
        raise ValueError(f"expected 'file.py:attribute' or 'package.module:attribute', given {path!r}")
    return found["place"], found["name"]


def read_callable_path(path: str) -> str:
    """Return the path of an attribute or of a model file; raise ValueError for any other text."""
    if is_model_path(path):
        return path
    if ":" not in path:
        files = "a model file such as 'model.onnx' or a folder such as './model'"
        raise ValueError(f"expected 'file.py:attribute', 'package.module:attribute', {files}, given {path!r}")
    return ":".join(split_callable(path))


def _device(device: str) -> str:
    try:
        return check_device_name(device)
    except ValueError as error:
        likely = likely_device_name(device)
        hint = f"; did you mean {likely!r}?" if likely else ""
        raise ValueError(f"{error}{hint}") from None


def _dtype(dtype: str) -> str:
    try:
        datatype_of(dtype)
    except (ValueError, SyntaxError):
        hint = nearest(dtype, DTYPE_WORDS)
        text = f"expected a dtype such as 'float32', 'FP32' or 'bytes', given {dtype!r}{hint}"
        raise ValueError(text) from None
    return dtype


def _level(level: str) -> str:
    if not level.isascii() or not level.isdigit() or level.startswith("0"):
        raise ValueError(f"expected a level of priority, an integer of at least 1, given {level!r}")
    return level


#: Readers of tables whose messages say more in a file.
_READERS: Final[dict[Any, Callable[[str], str]]] = {
    datatype_of: _dtype,
    check_model_name: read_model_name,
    check_device_name: _device,
}
