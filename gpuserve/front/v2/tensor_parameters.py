"""What the parameters of one tensor of a request say, over either protocol: its place in a region of shared
memory, and how many classes of an output are wanted. Pure. Parameters come as plain values by name; ``Kinds``
is how the protocol calls their types. Whether there is such a region, and what it holds, is the region
table's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from gpuserve.core.errors import InvalidArgument
from gpuserve.front.v2.limits import shown, shown_dim
from gpuserve.front.v2.types import NOTHING, RegionSlice

REGION: Final = "shared_memory_region"
OFFSET: Final = "shared_memory_offset"
NBYTES: Final = "shared_memory_byte_size"
CLASSIFICATION: Final = "classification"
_MAX_UINT64: Final = (1 << 64) - 1
_MAX_INT64: Final = (1 << 63) - 1


class Kinds(NamedTuple):
    """What a protocol calls a text and an integer, for the errors."""

    text: str
    integer: str


KINDS_OF_GRPC: Final = Kinds("string_param", "int64_param")


class OutputsAsked(NamedTuple):
    """The outputs that a request lists: their names in order, and what is to become of them."""

    names: tuple[str, ...] = ()
    placements: Mapping[str, RegionSlice] = NOTHING
    class_counts: Mapping[str, int] = NOTHING


def region_slice(given: Mapping[str, Any], name: str, kinds: Kinds) -> RegionSlice | None:
    """Where the tensor ``name`` lies, or is to be written; None where that is not in a region. Raises
    InvalidArgument: a parameter of the wrong type, one without the other, or numbers that no memory has.
    """
    region = given.get(REGION)
    if region is None:
        for key in (OFFSET, NBYTES):
            if key in given:
                raise InvalidArgument(
                    f"'{key}' can not be specified without '{REGION}' parameter for tensor '{shown(name)}'"
                )
        return None
    if type(region) is not str:
        raise _wrong_kind(REGION, name, kinds.text)
    if NBYTES not in given:
        raise InvalidArgument(
            f"'{NBYTES}' must be specified along with '{REGION}' parameter for tensor '{shown(name)}'"
        )
    offset, nbytes = (_integer(given, key, name, kinds) for key in (OFFSET, NBYTES))
    _check_range(region, offset, nbytes)
    return RegionSlice(region, offset, nbytes)


def class_count(given: Mapping[str, Any], name: str, kinds: Kinds) -> int:
    """How many classes of an output are wanted, 0 for all of it; InvalidArgument for no integer above 0."""
    if CLASSIFICATION not in given:
        return 0
    count = given[CLASSIFICATION]
    if type(count) is not int:
        raise InvalidArgument(
            f"invalid value type for '{CLASSIFICATION}' parameter, expected {kinds.integer}, "
            f"for output '{shown(name)}'"
        )
    if count <= 0:
        raise InvalidArgument(
            f"invalid value for '{CLASSIFICATION}' parameter, expected >= 0, and one class at least, "
            f"for output '{shown(name)}', got {shown_dim(count)}"
        )
    return count


def regions_of(inputs: list[Any], placements: Mapping[str, RegionSlice]) -> tuple[RegionSlice, ...]:
    read = [one.data for one in inputs if type(one.data) is RegionSlice]
    return (*read, *placements.values())


def _integer(given: Mapping[str, Any], key: str, name: str, kinds: Kinds) -> int:
    value = given.get(key, 0)
    if type(value) is not int:
        raise _wrong_kind(key, name, kinds.integer)
    return value


def _wrong_kind(key: str, name: str, kind: str) -> InvalidArgument:
    return InvalidArgument(
        f"invalid value type for '{key}' parameter for tensor '{shown(name)}', expected {kind}."
    )


def _check_range(region: str, offset: int, nbytes: int) -> None:
    if offset + nbytes > _MAX_UINT64:
        raise InvalidArgument(
            f"Integer overflow detected: byte_size ({shown_dim(nbytes)}) + offset ({shown_dim(offset)}) "
            f"exceeds maximum value ({_MAX_UINT64}) for region '{shown(region)}'"
        )
    if offset < 0:
        raise InvalidArgument(f"Invalid offset for shared memory region: '{shown(region)}'")
    if not 0 <= nbytes <= _MAX_INT64:
        raise InvalidArgument(f"Invalid offset + byte size for shared memory region: '{shown(region)}'")
