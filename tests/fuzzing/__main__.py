"""``scripts/fuzz``: tries inputs for so many minutes. Exit 1: one failed; it is printed, and kept."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import traceback
from collections.abc import Sequence

from fuzzing.targets import TARGETS, explore

_N_AT_ONCE = 300


def main(arguments: Sequence[str] | None = None) -> int:
    """Visit all targets in turn, until the time is over."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="default: %(default)g")
    parser.add_argument(
        "--seed", type=int, default=1, help="the same inputs for the same; default: %(default)s"
    )
    parser.add_argument(
        "--targets", default=",".join(TARGETS), metavar="NAME,...", help="default: %(default)s"
    )
    given = parser.parse_args(arguments)
    end_s = time.monotonic() + given.minutes * 60
    failed, targets = set(), given.targets.split(",")
    for number in itertools.count(given.seed * 1_000_000):
        for target in targets:
            if target not in failed and not tried(target, number):
                failed.add(target)
        if time.monotonic() > end_s or failed == set(targets):
            print(
                f"{number - given.seed * 1_000_000 + 1} rounds of {_N_AT_ONCE} inputs each", file=sys.stderr
            )
            return int(bool(failed))
    return 0


def tried(target: str, number: int) -> bool:
    """One round; whether nothing failed. What did is printed."""
    found = explore(target, number, _N_AT_ONCE)
    if found is None:
        return True
    print(f"{target}, seed {number}: kept as {found.keep()}\n{found.data!r}", flush=True)
    traceback.print_exception(found.error, file=sys.stdout)
    return False


if __name__ == "__main__":
    sys.exit(main())
