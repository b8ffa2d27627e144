"""``scripts/fuzz``: tries inputs for so many minutes. Exit 1: an input failed; it is printed and kept."""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from fuzzing.guided import explore_guided, is_installed
from fuzzing.targets import TARGETS, Failed, explore

_N_AT_ONCE = 300
#: Inputs that reach different branches, from one run to the next; git ignores the folder.
_FOLDER = Path(__file__).parents[2] / ".cache" / "fuzz"
_GUIDED = "guided"
_GENERATED = "generated"


def main(arguments: Sequence[str] | None = None) -> int:
    """Fuzz all targets until the time is over."""
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=5.0, help="of all targets; default: %(default)g")
    parser.add_argument(
        "--seed", type=int, help="generated inputs, the same for the same seed; --mode generated"
    )
    parser.add_argument(
        "--targets", default=",".join(TARGETS), metavar="NAME,...", help="default: %(default)s"
    )
    parser.add_argument(
        "--mode",
        choices=(_GUIDED, _GENERATED),
        help=f"{_GUIDED}: atheris mutates inputs that reach new branches; {_GENERATED}: hypothesis makes "
        f"inputs; default: {_GUIDED}, unless a seed is given or atheris is not installed",
    )
    parser.add_argument("--input", type=Path, metavar="FILE", help="try this input of --targets alone")
    given = parser.parse_args(arguments)
    targets = given.targets.split(",")
    if unknown := set(targets) - set(TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    if given.input is not None:
        data = given.input.read_bytes()
        return int(any(_fails(target, data) for target in targets))
    if given.mode == _GUIDED or (given.mode is None and given.seed is None and is_installed()):
        return _guided(targets, given.minutes * 60)
    return _generated(targets, given.minutes * 60, 1 if given.seed is None else given.seed)


def _guided(targets: Sequence[str], total_s: float) -> int:
    """Fuzz each target for an equal part of the time. Returns 1 if an input failed."""
    has_failed = False
    for target in targets:
        print(f"{target}: {total_s / len(targets):.0f} s, guided by coverage", flush=True)
        explored = explore_guided(target, _FOLDER / target, total_s / len(targets))
        print(f"{target}: {explored.n_tried} inputs\n{explored.report}", end="")
        for path in explored.failed:
            has_failed = True
            kept = Failed(target, path.read_bytes(), RuntimeError()).keep()
            print(
                f"{target}, {path.name}: kept as {kept}\n{path.read_bytes()!r}\n{_again(target, kept)}",
                flush=True,
            )
    return int(has_failed)


def _generated(targets: Sequence[str], total_s: float, seed: int) -> int:
    """Visit all targets in turn, with generated inputs. Returns 1 if an input failed."""
    end_s = time.monotonic() + total_s
    failed: set[str] = set()
    for number in itertools.count(seed * 1_000_000):
        for target in targets:
            if target not in failed and not _tried(target, number):
                failed.add(target)
        if time.monotonic() > end_s or failed == set(targets):
            print(f"{number - seed * 1_000_000 + 1} rounds of {_N_AT_ONCE} inputs each", file=sys.stderr)
            return int(bool(failed))
    return 0


def _tried(target: str, number: int) -> bool:
    """Explore a target for one round. Prints an input that failed, and returns whether there is none."""
    found = explore(target, number, _N_AT_ONCE)
    if found is None:
        return True
    kept = found.keep()
    print(f"{target}, seed {number}: kept as {kept}\n{found.data!r}\n{_again(target, kept)}", flush=True)
    traceback.print_exception(found.error, file=sys.stdout)
    return False


def _fails(target: str, data: bytes) -> bool:
    try:
        TARGETS[target].check(data)
    except Exception as error:
        traceback.print_exception(error, file=sys.stdout)
        return True
    return False


def _again(target: str, kept: Path) -> str:
    return f"again: scripts/fuzz --targets {target} --input {kept}"


if __name__ == "__main__":
    sys.exit(main())
