"""All attacks by their names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from benchmarks.attacks import bodies, floods, waiting
from benchmarks.attacks.connections import Victim

ATTACKS: Final[dict[str, Callable[[Victim], None]]] = {
    **waiting.ATTACKS,
    **bodies.ATTACKS,
    **floods.ATTACKS,
}
