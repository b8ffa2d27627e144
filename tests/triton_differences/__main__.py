"""The command line: starts both servers, runs the cases, prints the differences.

stdout gets the Markdown, stderr the progress. Exit codes: 0 no difference that is not listed, 1 some, or
a server failed; 2 Triton cannot be had, or usage.
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from benchmarks.peers import PeerCache, ServerMissing
from benchmarks.servers import ServerFailed
from triton_differences.answers import tree
from triton_differences.cases import all_cases
from triton_differences.compare import Verdict, differences, verdict
from triton_differences.expected import meant_by
from triton_differences.meant import MEANT
from triton_differences.model_py.probes import compared
from triton_differences.model_py.servers import ModelPyGpuServe, ModelPyTriton
from triton_differences.model_table import loaded_names
from triton_differences.report import Result, markdown
from triton_differences.servers import ComparedGpuServe, ComparedTriton
from triton_differences.steps import Case
from triton_differences.subject import Subject
from triton_differences.wire import CaseAnswers

_ROOT = Path(__file__).resolve().parents[2]


def main(arguments: Sequence[str]) -> int:
    """Compare and print; returns the exit code."""
    options = _parse(arguments)
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    cache = PeerCache(options.cache.absolute(), options.peer_python)
    servers = (ComparedTriton(cache), ComparedGpuServe(cache))
    try:
        for server in servers:
            server.prepare()
    except ServerMissing as error:
        _say(f"error: Triton cannot be had here: {error}")
        return 2
    chosen = [one for one in all_cases() if fnmatchcase(one.name, options.cases)]
    logs = cache.folder / "logs"
    try:
        results: list[Result] = []
        if chosen:
            names = loaded_names()
            with Subject(servers[0], logs, names) as triton, Subject(servers[1], logs, names) as gpuserve:
                results += [_result(case, triton.run(case), gpuserve.run(case)) for case in chosen]
        results += compared(ModelPyTriton(cache), ModelPyGpuServe(cache), logs, options.cases)
    except ServerFailed as error:
        _say(f"error: {error}")
        return 1
    print(markdown(results))
    return 1 if any(one.is_surprise for one in results) else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    description = "Send the same requests to this server and to Triton and print the differences."
    parser = argparse.ArgumentParser(prog="scripts/compare_with_triton", description=description)
    parser.add_argument("--cases", default="*", metavar="PATTERN", help="only those; default: all")
    parser.add_argument("--cache", type=Path, default=_ROOT / ".cache/bench", help="default: %(default)s")
    parser.add_argument(
        "--peer-python", type=Path, default=Path("/usr/bin/python3"), help="runs Triton's models"
    )
    return parser.parse_args(arguments)


def _result(case: Case, triton: CaseAnswers, gpuserve: CaseAnswers) -> Result:
    found = list(differences(_plain(triton), _plain(gpuserve), case.ignore))
    kind = verdict(found)
    meant = meant_by(case.name, found, MEANT) if kind is Verdict.DIFFERENT else ()
    return Result(case.name, kind, found, meant)


def _plain(answers: CaseAnswers) -> dict[str, Any]:
    steps = {str(number): tree(one) for number, one in enumerate(answers.answers, 1)}
    return steps | {f"region {number}": one.hex() for number, one in enumerate(answers.regions, 1)}


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
