"""The mappings of a config file, made of the tables of options (``gpuserve/options``): a key has the kind,
the default and the description of its row. What concerns several keys is in ``rules``. No file, no
environment.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final

from gpuserve.config.entries.kinds import (
    MISSING,
    UNEXPECTED,
    UNKNOWN,
    Duration,
    Flag,
    FlagOrNumber,
    Kind,
    ListOf,
    MappingOf,
    Mistake,
    Number,
    NumberOrWord,
    OrNull,
    Place,
    Text,
)
from gpuserve.declare.spec import check_model_name
from gpuserve.devices.names import check_device_name, meant
from gpuserve.errors import BindError
from gpuserve.options import REQUIRED, Option, Row, element, key_and_value, nearest, rows
from gpuserve.runtimes.table import is_model_path
from gpuserve_worker.protocol.tensor import ITEMSIZE, datatype_of

_CALLABLE = re.compile(
    r"(?P<place>[^:]+\.py|[A-Za-z_][\w]*(\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)"
)
#: The words offered when a dtype is misspelt.
DTYPE_WORDS = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "bytes"),
    *ITEMSIZE,
)


def model_name(name: str) -> str:
    """The name, if a model may have it, or ValueError."""
    try:
        return check_model_name(name)
    except BindError as error:
        raise ValueError(str(error)) from None


def split_callable(path: str) -> tuple[str, str]:
    """``linear.py:Linear`` as ("linear.py", "Linear"). Raises ValueError: the path has neither form."""
    found = _CALLABLE.fullmatch(path)
    if found is None:
        raise ValueError(f"expected 'file.py:attribute' or 'package.module:attribute', given {path!r}")
    return found["place"], found["name"]


def callable_path(path: str) -> str:
    """What ``callable`` may say: the path of an attribute, or of a model file. Raises ValueError: neither."""
    if is_model_path(path):
        return path
    if ":" not in path:
        raise ValueError(
            "expected 'file.py:attribute', 'package.module:attribute' or a model file such as 'model.onnx', "
            f"given {path!r}"
        )
    return ":".join(split_callable(path))


def _device(device: str) -> str:
    try:
        return check_device_name(device)
    except ValueError as error:
        likely = meant(device)
        hint = f"; did you mean {likely!r}?" if likely else ""
        raise ValueError(f"{error}{hint}") from None


def _dtype(dtype: str) -> str:
    try:
        datatype_of(dtype)
    except (ValueError, SyntaxError):
        raise ValueError(
            f"expected a dtype such as 'float32', 'FP32' or 'bytes', given {dtype!r}"
            f"{nearest(dtype, DTYPE_WORDS)}"
        ) from None
    return dtype


def _level(level: str) -> str:
    if not level.isascii() or not level.isdigit() or level.startswith("0"):
        raise ValueError(f"expected a level of priority, an integer of at least 1, given {level!r}")
    return level


# ---- mappings -----------------------------------------------------------------------------------


class Key:
    """A key of a mapping. ``default`` is ``REQUIRED`` where there is none; ``make`` makes one each time."""

    def __init__(
        self,
        kind: Kind,
        description: str,
        default: Any = REQUIRED,
        make: Callable[[], Any] | None = None,
        examples: tuple[Any, ...] = (),
        secret: bool = False,
    ) -> None:
        self.kind = kind
        self.description = description
        self.default = default
        self.make = make
        self.examples = examples
        self.secret = secret

    @property
    def is_required(self) -> bool:
        return self.default is REQUIRED and self.make is None

    def value(self) -> Any:
        return self.default if self.make is None else self.make()


class Entry:
    """A mapping of the file: unknown keys are mistakes. Its values are attributes; ``given`` are the keys
    that the file has, all others have their defaults.
    """

    keys: ClassVar[Mapping[str, Key]] = {}
    #: Triton's and PyTriton's names for keys that have another here.
    spellings: ClassVar[Mapping[str, str]] = {}
    given: frozenset[str]

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.given = frozenset(values)
        for name, key in self.keys.items():
            setattr(self, name, values[name] if name in values else key.value())

    if typing.TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...

    @classmethod
    def read(cls, data: Any, path: Place, found: list[Mistake]) -> Any:
        """The mapping of this data; what is wrong with it is added to ``found``."""
        if not isinstance(data, Mapping):
            found.append(Mistake(path, UNEXPECTED, "a mapping", data))
            return data
        known = tuple(cls.keys)
        values = {}
        for name, one in data.items():
            if name in cls.keys:
                values[name] = cls.keys[name].kind.read(one, (*path, name), found)
            else:
                found.append(Mistake((*path, name), UNKNOWN, known=known, at_key=True))
        for name, key in cls.keys.items():
            if name not in values and key.is_required:
                found.append(Mistake((*path, name), MISSING))
        return cls(values)

    def plain(self, *, nulls: bool = True) -> dict[str, Any]:
        """All values as plain data, defaults included; without ``nulls`` only what is not None."""
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
    """A mapping of a class of entries."""

    def __init__(self, entry: type[Entry]) -> None:
        self.entry = entry

    def read(self, value: Any, path: Place, found: list[Mistake]) -> Any:
        return self.entry.read(value, path, found)

    def schema(self) -> dict[str, Any]:
        return {"$ref": f"#/$defs/{self.entry.__name__}"}


# ---- from tables of options ---------------------------------------------------------------------

FILLED: Final = Text(some=True)
#: What reads a text, where a file has its own words for what is wrong.
_READERS: Final[dict[Any, Callable[[str], str]]] = {
    datatype_of: _dtype,
    check_model_name: model_name,
    check_device_name: _device,
}


@functools.cache
def entry_of(table: Any) -> type[Entry]:
    """The mapping of a file that a table of options stands for: a class made of its rows."""
    name = re.sub(r"(Spec|Settings)?$", "Entry", table.__name__, count=1)
    content = {"__doc__": inspect.getdoc(table), "keys": keys_of(table), "spellings": spellings_of(table)}
    return type(name, (Entry,), content)


def keys_of(table: Any, *left_out: str) -> dict[str, Key]:
    return {name: _key(row) for name, row in rows(table).items() if name not in left_out}


def spellings_of(table: Any) -> dict[str, str]:
    """Other names of a table's options, as far as they are keys beside them."""
    spelled = {row.option.triton: row.name for row in rows(table).values()}
    return {theirs: name for theirs, name in spelled.items() if theirs and "." not in theirs}


def _key(row: Row) -> Key:
    said = row.option
    kind = _kind(row.hint, said)
    if (said.nullable or row.has_none) and not said.needed:
        kind = OrNull(kind)
    default: Any = row.default
    make: Callable[[], Any] | None = None
    if default is not REQUIRED and isinstance(kind, EntryOf):
        make = functools.partial(kind.entry, {})
    elif default is not REQUIRED and key_and_value(row.hint) is not None:
        default, make = {}, dict
    elif isinstance(default, tuple):
        default, make = list(default), functools.partial(list, default)
    elif isinstance(default, dict):
        make = default.copy
    elif said.nullable:
        default = None
    return Key(kind, said.description, default, make, said.examples, said.secret)


def _kind(hint: Any, said: Option) -> Kind:
    """The kind of a value of that type, or of the elements of a list, with what one by itself must be."""
    if dataclasses.is_dataclass(hint):
        return EntryOf(entry_of(typing.cast(Any, hint)))
    if (pair := key_and_value(hint)) is not None or typing.get_origin(hint) is dict:
        key, value = pair or typing.get_args(hint)
        some = said.some and typing.get_origin(hint) is tuple
        if pair is None:
            return MappingOf(Text(), _kind(value, Option("")))
        return MappingOf(
            Text(reads=_level) if key is int else FILLED, _kind(value, Option("", some=True)), some
        )
    if (one := element(hint)) is not None:
        return ListOf(_kind(one, dataclasses.replace(said, some=one is str and not said.words)), said.some)
    if typing.get_origin(hint) is tuple:
        return ListOf(FlagOrNumber(), count=2)
    return _scalar(hint, said)


def _scalar(hint: Any, said: Option) -> Kind:
    if hint is int and said.words and said.read is not None:
        return NumberOrWord(said.words, said.read, said.least, said.most)
    if said.unit:
        return Duration(said.unit, said.least, said.most)
    if hint in {int, float}:
        return Number(hint is float, said.least, said.most)
    if hint is bool:
        return Flag()
    reads = None if said.read is None else _READERS.get(said.read, said.read)
    return Text(said.some and not said.words and hint is str, said.words, reads)
