"""``python -m benchmarks.simulations.autoscaling``: settings of an autoscaler, compared, as Markdown.
Some minutes of one core; ``--out DIR`` keeps the figures and the pictures as well.

``--trace FILE`` takes a trace of one's own in the place of those made by formula: lines of
``seconds,requests a second``, as a query of Prometheus over a day gives them.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from benchmarks.simulations.autoscaling import pictures, tables, traffic
from benchmarks.simulations.autoscaling.grid import (
    BASE,
    DOWN_WINDOWS_S,
    SEED,
    STARTS_S,
    TARGETS,
    Case,
    cases,
    choose,
    longest_waits_ms,
    points,
    variations,
    with_target,
)
from benchmarks.simulations.autoscaling.service import measured
from benchmarks.simulations.capacity import RESULTS

COMMAND: Final = "python -m benchmarks.simulations.autoscaling"


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate and print the tables."""
    parser = argparse.ArgumentParser(prog=COMMAND)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder with the measured times")
    parser.add_argument("--out", type=Path, help="folder for autoscaling.json and the pictures")
    parser.add_argument("--trace", type=Path, help="a trace of one's own")
    parser.add_argument("--scale", type=float, default=1.0, help="factor for its rates; default: %(default)s")
    parser.add_argument("--seed", type=int, default=SEED, help="default: %(default)s")
    given = parser.parse_args(arguments)
    over = cases(measured(given.results), given.seed)
    if given.trace is None:
        compare(over, given.out)
    else:
        follow(over, given.trace, given.scale)


def compare(over: Sequence[Case], out: Path | None) -> None:
    """The grid, which setting is taken, and what else matters."""
    found = points(over, tell=lambda text: print(text, file=sys.stderr))
    taken = choose(found, longest_waits_ms(over))
    target, window_s = taken
    setting = with_target(BASE, target, window_s)
    _print(tables.meaning({case.service: case.states for case in over}.items(), TARGETS))
    print(f"Taken: target {target:g}, window down {window_s} s.\n")
    _print(tables.by_target(found, window_s, STARTS_S[0]))
    _print(tables.by_window(found, target, STARTS_S[0]))
    _print(tables.varied(over, variations(setting)))
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        text = json.dumps(tables.plain(found, taken, COMMAND), indent=1)
        (out / "autoscaling.json").write_text(f"{text}\n")
        pictures.targets(found, window_s, STARTS_S[0], out / "autoscaling-targets.svg")
        pictures.histories([(case, case.run(setting)) for case in over[:2]], out / "autoscaling-pods.svg")


def follow(over: Sequence[Case], path: Path, scale: float) -> None:
    """Simulate all targets on one trace."""
    trace = traffic.read(path.stem, path.read_text().splitlines(), scale)
    own = tables.own(over, trace, traffic.arrivals(trace, 1))
    found = points(own, windows_s=DOWN_WINDOWS_S[-1:], starts_s=STARTS_S[:1])
    _print(tables.by_target(found, DOWN_WINDOWS_S[-1], STARTS_S[0]))


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)
    print()


if __name__ == "__main__":
    main()
