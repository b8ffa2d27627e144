"""All attacks by their names."""

from __future__ import annotations

from typing import Final

from benchmarks.attacks import bodies, deaths, floods, openai, operator, waiting
from benchmarks.attacks.cases import Case

ATTACKS: Final[dict[str, Case]] = {
    **{name: Case(attack) for one in (waiting, bodies, floods) for name, attack in one.ATTACKS.items()},
    **bodies.CASES,
    **openai.CASES,
    **deaths.CASES,
    **operator.CASES,
}
