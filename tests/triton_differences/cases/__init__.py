"""The cases, a module for each part of the protocol. ``all_cases`` has them in the order they run."""

from __future__ import annotations

from triton_differences.cases import (
    classification,
    compression,
    datatypes,
    generate,
    grpc_framing,
    http_data,
    http_framing,
    inference,
    metadata,
    parameters,
    raw_binary,
    repository,
    sequences,
    settings,
    shared_memory,
    statistics,
    stream,
)
from triton_differences.steps import Case

#: Those that count what a server did come first, while it is fresh; those that change what it serves, last.
_PARTS = (
    *(statistics, metadata, inference, datatypes, http_data, http_framing, grpc_framing, parameters),
    *(raw_binary, classification, compression, stream, generate, sequences, shared_memory, settings),
    repository,
)


def all_cases() -> tuple[Case, ...]:
    """Every case."""
    return tuple(case for part in _PARTS for case in part.cases())
