"""The kinds of values in a config file: what one field checks by itself. The mappings are made of them.

What concerns several fields is in ``rules``. No file, no environment.
"""

from __future__ import annotations

import re
import typing
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from gpuserve.access import header_pattern
from gpuserve.devices.names import check_device_name, meant
from gpuserve.errors import BindError
from gpuserve.rate_spec import ResourceLimit
from gpuserve.spec import check_model_name
from gpuserve_worker.tensor import ITEMSIZE, datatype_of

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
    """``linear.py:Linear`` as ("linear.py", "Linear").

    Raises:
        ValueError: the path has neither form.
    """
    found = _CALLABLE.fullmatch(path)
    if found is None:
        raise ValueError(f"expected 'file.py:attribute' or 'package.module:attribute', given {path!r}")
    return found["place"], found["name"]


def _callable_path(path: str) -> str:
    split_callable(path)
    return path


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


def nearest(word: str, known: typing.Iterable[str]) -> str:
    """``; did you mean '…'?`` with the known word most like this one, "" where none is."""
    import difflib

    folded = {candidate.casefold(): candidate for candidate in known}
    close = difflib.get_close_matches(word.casefold(), folded, n=1, cutoff=0.5)
    return f"; did you mean {folded[close[0]]!r}?" if close else ""


def _header_pattern(pattern: str) -> str:
    header_pattern(pattern)
    return pattern


def _rate_resource(text: str) -> str:
    ResourceLimit.parse(text)
    return text


def _level(level: str) -> str:
    if not level.isascii() or not level.isdigit() or level.startswith("0"):
        raise ValueError(f"expected a level of priority, an integer of at least 1, given {level!r}")
    return level


class Entry(BaseModel):
    """A mapping of the file: unknown keys are errors, and no type is coerced into another."""

    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=()
    )


ModelName = Annotated[str, AfterValidator(_model_name)]
CallablePath = Annotated[str, AfterValidator(_callable_path)]
CallableArguments = Annotated[dict[str, Any], AfterValidator(_plain)]
Device = Annotated[str, AfterValidator(_device)]
Dtype = Annotated[str, AfterValidator(_dtype)]
Dimension = Annotated[int, Field(ge=-1)]
Port = Annotated[int, Field(ge=0, le=65535)]
HeaderPattern = Annotated[str, AfterValidator(_header_pattern)]
RateResource = Annotated[str, AfterValidator(_rate_resource)]
#: A level of priority as the key of a mapping; keys are text.
Level = Annotated[str, AfterValidator(_level)]
EndpointGroup = Literal[
    "admin",
    "health",
    "inference",
    "logging",
    "metadata",
    "model-config",
    "model-repository",
    "shared-memory",
    "statistics",
    "trace",
]
