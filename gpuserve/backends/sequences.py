"""What a config.pbtxt says of the sequences of a model: iterative sequences, and implicit state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def iterative_slots(config: Mapping[str, Any]) -> int:
    """Return how many requests of an instance are active at once, or 0 unless the sequences are iterative.
    ``config`` is a ``ModelConfig`` as plain data.
    """
    sequences = config.get("sequence_batching") or {}
    if not sequences.get("iterative_sequence"):
        return 0
    rows = max(1, int(config.get("max_batch_size", 0)))
    return int((sequences.get("oldest") or {}).get("max_candidate_sequences", 0)) or rows
