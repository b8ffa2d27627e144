"""One attack, the server that it needs, and the limits that are its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from benchmarks.attacks.attacked import PLAIN, Setting
from benchmarks.attacks.connections import Victim


class Judgement(NamedTuple):
    """What an attack itself has seen, and whether that is as it should be."""

    text: str
    is_good: bool


class Case(NamedTuple):
    """An attack.

    ``p99_ms``: a limit of its own for the well-behaved client; 0 is the limit of all. ``least_s``: the
    shortest time of the attack. ``by_operator``: an operator or a fault does this to the server, and the
    attack takes as long as it needs.
    """

    attack: Callable[[Victim], Iterable[Judgement] | None]
    setting: Setting = PLAIN
    p99_ms: float = 0.0
    least_s: float = 0.0
    by_operator: bool = False
