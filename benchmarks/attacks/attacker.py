"""``python -m benchmarks.attacks.attacker NAME VICTIM``: one attack, in a process of its own.

``VICTIM`` is a ``Victim`` in JSON. The process prints an empty line when the attack begins, and a line of
JSON for each judgement of the attack itself.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Final

from benchmarks.attacks import bodies, deaths, floods, waiting
from benchmarks.attacks.connections import Victim
from benchmarks.attacks.limits import Case

#: All attacks by their names.
ATTACKS: Final[dict[str, Case]] = {
    **{
        attack.__name__.replace("_", "-"): Case(attack)
        for attack in (*waiting.ATTACKS, *bodies.ATTACKS, *floods.ATTACKS)
    },
    **bodies.CASES,
    **deaths.CASES,
}


def main(arguments: Sequence[str]) -> None:
    name, given = arguments
    case = ATTACKS[name]
    if not case.by_operator:
        os.nice(10)  # the server that shares the machine with the attacker is measured
    victim = Victim(*(tuple(one) if isinstance(one, list) else one for one in json.loads(given)))
    begun: list[None] = []
    victim.began = lambda: begun or begun.append(print(flush=True))
    for judged in case.attack(victim) or ():
        print(json.dumps(judged), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
