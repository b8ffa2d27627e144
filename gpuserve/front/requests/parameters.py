"""Request and tensor parameters of both protocols: sequences, shared-memory regions and classification. Pure.

Parameters come as plain values by name; ``Kinds`` names their types in a protocol's error texts. Whether the
model supports sequences is checked in ``validation``, and whether a region exists in the region table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from gpuserve.core.errors import InvalidArgument
from gpuserve.front.requests.inference import NOTHING, RegionSlice, Sequence
from gpuserve.front.requests.json_values import described, typed
from gpuserve.front.requests.limits import shown, shown_dim

ID: Final = "sequence_id"
START: Final = "sequence_start"
END: Final = "sequence_end"
SEQUENCE_KEYS: Final = frozenset({ID, START, END})
MAX_ID_CHARACTERS: Final = 128
_MAX_UINT64: Final = (1 << 64) - 1


def sequence_of(correlation_id: int | str, *, start: bool, end: bool) -> Sequence | None:
    """Return the sequence of a request, None if its id is 0 or "". Negative ids are above 2^63."""
    if isinstance(correlation_id, int):
        correlation_id &= _MAX_UINT64
    elif len(correlation_id) > MAX_ID_CHARACTERS:
        raise InvalidArgument(
            f"'{ID}' '{shown(correlation_id)}' is longer than the {MAX_ID_CHARACTERS} characters it may "
            f"have, got {len(correlation_id)}"
        )
    return Sequence(correlation_id, start, end) if correlation_id else None


def json_sequence(parameters: dict[str, Any]) -> Sequence | None:
    """Return the sequence in HTTP parameters. Raise InvalidArgument for a wrong type or range."""
    if SEQUENCE_KEYS.isdisjoint(parameters):
        return None
    correlation_id = parameters.get(ID, 0)
    if type(correlation_id) is not str and not (
        type(correlation_id) is int and 0 <= correlation_id <= _MAX_UINT64
    ):
        raise InvalidArgument(
            f"'{ID}': expected an integer of 64 bits, or a string, got {described(correlation_id)}"
        )
    return sequence_of(
        correlation_id,
        start=typed(parameters.get(START, False), bool, f"'{START}'"),
        end=typed(parameters.get(END, False), bool, f"'{END}'"),
    )


# ---- parameters of tensors -----------------------------------------------------------------------

REGION: Final = "shared_memory_region"
OFFSET: Final = "shared_memory_offset"
NBYTES: Final = "shared_memory_byte_size"
CLASSIFICATION: Final = "classification"
_MAX_INT64: Final = (1 << 63) - 1


class Kinds(NamedTuple):
    """A protocol's names of the types text and integer, for error texts."""

    text: str
    integer: str


KINDS_OF_GRPC: Final = Kinds("string_param", "int64_param")


class RequestedOutputs(NamedTuple):
    """The outputs that a request lists: their names in order, their region slices, and their class counts."""

    names: tuple[str, ...] = ()
    placements: Mapping[str, RegionSlice] = NOTHING
    class_counts: Mapping[str, int] = NOTHING


def region_slice(given: Mapping[str, Any], name: str, kinds: Kinds) -> RegionSlice | None:
    """Return the shared-memory region slice of tensor ``name``, or None if the tensor is not in a region.

    Raises InvalidArgument for a parameter of the wrong type, a missing parameter, or impossible numbers.
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
    offset, nbytes = given.get(OFFSET, 0), given[NBYTES]
    for key, value in ((OFFSET, offset), (NBYTES, nbytes)):
        if type(value) is not int:
            raise _wrong_kind(key, name, kinds.integer)
    _check_range(region, offset, nbytes)
    return RegionSlice(region, offset, nbytes)


def class_count(given: Mapping[str, Any], name: str, kinds: Kinds) -> int:
    """Return the number of classes wanted, 0 for the whole output. Raise InvalidArgument if invalid."""
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
