"""The kinds of values in a config file: what one field checks by itself. The mappings are made of them, and
of the tables of options (``gpuserve/options``). What concerns several fields is in ``rules``. No file, no
environment.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, create_model

from gpuserve.declare.spec import check_model_name
from gpuserve.devices.names import check_device_name, meant
from gpuserve.errors import BindError
from gpuserve.options import REQUIRED, Option, Row, element, key_and_value, nearest, rows
from gpuserve_worker.protocol.tensor import ITEMSIZE, datatype_of

_CALLABLE = re.compile(
    r"(?P<place>[^:]+\.py|[A-Za-z_][\w]*(\.[A-Za-z_]\w*)*):(?P<name>[A-Za-z_]\w*(\.[A-Za-z_]\w*)*)"
)
_MSGPACK_INTEGERS = range(-(2**63), 2**64)
#: The words offered when a dtype is misspelt.
DTYPE_WORDS = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "bytes"),
    *ITEMSIZE,
)


def _model_name(name: str) -> str:
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


def _plain(value: Any) -> Any:
    """Callable arguments travel to a worker as msgpack: the types of YAML, and integers of 64 bits."""
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_plain(entry) for entry in value]
    if isinstance(value, int) and value not in _MSGPACK_INTEGERS:
        raise ValueError(f"expected integers of at most 64 bits, given {value}")
    return value


def _level(level: str) -> str:
    if not level.isascii() or not level.isdigit() or level.startswith("0"):
        raise ValueError(f"expected a level of priority, an integer of at least 1, given {level!r}")
    return level


class Entry(BaseModel):
    """A mapping of the file: unknown keys are errors, and no type is coerced into another."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        defer_build=True,
    )
    #: Triton's and PyTriton's names for keys that have another here.
    spellings: typing.ClassVar[Mapping[str, str]] = {}


Filled = Annotated[str, Field(min_length=1)]
ModelName = Annotated[str, AfterValidator(_model_name)]
CallablePath = Annotated[str, AfterValidator(lambda path: ":".join(split_callable(path)))]
CallableArguments = Annotated[dict[str, Any], AfterValidator(_plain)]
Dtype = Annotated[str, AfterValidator(_dtype)]
#: A level of priority as the key of a mapping; keys are text.
Level = Annotated[str, AfterValidator(_level)]


# ---- from tables of options ---------------------------------------------------------------------

#: What reads a text, where a file has its own words for what is wrong.
_READERS: Final[dict[Any, Any]] = {
    datatype_of: Dtype,
    check_model_name: ModelName,
    check_device_name: Annotated[str, AfterValidator(_device)],
}
#: Types that are made here, which type checkers need not follow.
_LITERAL: Final[Any] = Literal
_LIST: Final[Any] = list
_DICT: Final[Any] = dict


@functools.cache
def entry_of(table: Any, *left_out: str) -> Any:
    """The mapping of a file that a table of options stands for: a class made of its rows."""
    fields: dict[str, Any] = {name: _field(row) for name, row in rows(table).items() if name not in left_out}
    name = re.sub(r"(Spec|Settings)?$", "Entry", table.__name__, count=1)
    made = create_model(name, __base__=Entry, __doc__=inspect.getdoc(table), **fields)
    spellings = {row.option.triton: row.name for row in rows(table).values()}
    made.spellings = {spelled: name for spelled, name in spellings.items() if spelled and "." not in spelled}
    return made


def _field(row: Row) -> tuple[Any, Any]:
    said = row.option
    annotation: Any = Annotated[_annotation(row.hint, said), Field(**_size(row.hint, said))]
    if (said.nullable or row.has_none) and not said.needed:
        annotation = annotation | None
    more: dict[str, Any] = {"description": said.description, "repr": not said.secret}
    if said.examples:
        more["examples"] = list(said.examples)
    if row.default is REQUIRED:
        return annotation, Field(**more)
    if row.default is not None and dataclasses.is_dataclass(row.hint):
        return annotation, Field(default_factory=entry_of(typing.cast(Any, row.hint)), **more)
    default: Any = list(row.default) if isinstance(row.default, tuple) else row.default
    if key_and_value(row.hint) is not None:
        default = {}
    return annotation, Field(default=None if said.nullable else default, **more)


def _annotation(hint: Any, said: Option) -> Any:
    """The type of a value, or of the elements of a list, with what one by itself must be."""
    if dataclasses.is_dataclass(hint):
        return entry_of(typing.cast(Any, hint))
    if (pair := key_and_value(hint)) is not None:
        filled = Option("", some=True)
        value: Any = Annotated[_annotation(pair[1], filled), Field(**_size(pair[1], filled))]
        return _DICT[Level if pair[0] is int else Filled, value]
    if (kind := element(hint)) is not None:
        one = dataclasses.replace(said, some=kind is str and not said.words)
        return _LIST[Annotated[_annotation(kind, one), Field(**_size(kind, one))]]
    if typing.get_origin(hint) is tuple:
        return list[bool | int | float]
    kind = _LITERAL[said.words] if said.words else hint
    if said.read is None:
        return kind
    return (
        _READERS.get(said.read)
        or Annotated[kind, (BeforeValidator if said.words else AfterValidator)(said.read)]
    )


def _size(hint: Any, said: Option) -> dict[str, Any]:
    """The bounds of a value as pydantic has them."""
    if hint in {int, float}:
        bounds = {"ge": said.least, "le": said.most}
        return {key: one for key, one in bounds.items() if one is not None}
    if typing.get_origin(hint) is tuple and element(hint) is None:
        return {"min_length": 2, "max_length": 2}
    is_sized = element(hint) is not None or (hint is str and not said.words)
    return {"min_length": 1} if said.some and is_sized else {}
