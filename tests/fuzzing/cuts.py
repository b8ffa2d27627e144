"""Where the bytes of an input are cut into what comes at a time: by chance, the same for the same input."""

from __future__ import annotations

from random import Random


def cuts_of(data: bytes) -> list[int]:
    """None, a few, or every place."""
    chance = Random(data)
    match chance.randrange(4):
        case 0:
            return []
        case 1:
            return list(range(len(data)))
        case _:
            return sorted(chance.randrange(len(data) + 1) for _ in range(chance.randrange(1, 6)))
