"""Draws the sweeps of an earlier run anew: python -m benchmarks.redraw [benchmarks/results/sweeps.json]
Nothing is measured here.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.rounds import Sample, Samples
from benchmarks.servers.server import Kind
from benchmarks.sweeps import SWEEPS, SweepPart

_RESULTS = Path(__file__).parent / "results"
#: What the bare machine does, beside servers.
_FLOORS = frozenset({"memcpy"})


def sweeps_of(document: Mapping[str, Any]) -> SweepPart:
    """Give the sweeps as they were measured, out of the document that they were written to."""
    sweeps = [one for one in SWEEPS if one.name in document["sweeps"]]
    samples = Samples()
    for sweep in sweeps:
        for at, row in sweep.rows.items():
            for server, columns in document["sweeps"][sweep.name]["points"][str(at)]["servers"].items():
                runs = [dict(zip(columns, run, strict=True)) for run in zip(*columns.values(), strict=True)]
                if runs:
                    samples.by_pair[row.name, server] = [Sample(**run) for run in runs]
    titles = document["servers"] | {floor: floor for floor in _FLOORS}
    kinds = {server: Kind.OURS if server == "gpuserve" else Kind.PEER for server in document["servers"]}
    return SweepPart(sweeps, titles, kinds, samples)


def main() -> None:
    path = Path(sys.argv[1]) if sys.argv[1:] else _RESULTS / "sweeps.json"
    for drawn in sweeps_of(json.loads(path.read_text())).write_plots(path.parent):
        print(drawn)


if __name__ == "__main__":
    main()
