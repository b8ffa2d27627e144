"""``python -m benchmarks.rollout``: pods under load are replaced, drained and killed, and no request is lost.

stdout or ``--out`` gets the report, stderr the progress. Exit 1: a request was lost, or a pod had to be
killed at the end of its grace period, or the pods did not do what they should.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, TypeVar

from benchmarks.rollout.cluster import Stuck
from benchmarks.rollout.envoy import EnvoyFailed
from benchmarks.rollout.manifest import ManifestError
from benchmarks.rollout.release import ExportFailed
from benchmarks.rollout.report import Findings, markdown
from benchmarks.rollout.run import Options, run

_EXPECTED: Final = (Stuck, ManifestError, ExportFailed, EnvoyFailed)
_INTERRUPTED: Final = 130

Number = TypeVar("Number", int, float)

_DESCRIPTION: Final = (
    "Replaces, drains and kills pods of a Deployment under load, without a cluster, and reports what became "
    "of each request. Exit status 1: one was lost, or the pods did not do what they should."
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write, and say whether it was good."""
    options, out = parse(arguments)
    try:
        findings = asyncio.run(_until_signal(options))
    except (asyncio.CancelledError, KeyboardInterrupt):
        return _INTERRUPTED
    except (*_EXPECTED, BaseExceptionGroup) as error:
        expected, others = _sorted(error)
        if others:
            raise
        return _failed(expected, options)
    _write(findings, out)
    if not findings.good():
        lost, late = len(findings.lost), len(findings.outlived_grace)
        return _failed([f"{lost} requests lost, {late} pods outlived their grace period"], options)
    shutil.rmtree(options.folder)
    return 0


def parse(arguments: Sequence[str] | None) -> tuple[Options, Path | None]:
    """The options; ends the program with 2 on a usage error."""
    parser = argparse.ArgumentParser(prog="scripts/rollout", description=_DESCRIPTION)
    parser.add_argument(
        "--rollouts", type=_at_least(0, int), default=20, help="of all pods; default: %(default)s"
    )
    parser.add_argument(
        "--drains", type=_at_least(0, int), default=50, help="single pods evicted; default: %(default)s"
    )
    parser.add_argument(
        "--kills", type=_at_least(0, int), default=5, help="pods killed; default: %(default)s"
    )
    parser.add_argument(
        "--failed-releases",
        type=_at_least(0, int),
        default=1,
        help="rollouts whose new pods cannot load; default: %(default)s",
    )
    parser.add_argument("--replicas", type=_at_least(1, int), default=3, help="pods; default: %(default)s")
    parser.add_argument(
        "--rate", type=_at_least(0.1, float), default=100.0, help="requests a second; default: %(default)s"
    )
    parser.add_argument(
        "--max-delay",
        type=_at_least(0.0, float),
        default=5.0,
        help="seconds until clients hear of a change; default: %(default)s",
    )
    parser.add_argument("--seed", type=int, default=1, help="of load and delays; default: %(default)s")
    parser.add_argument("--quick", action="store_true", help="with an overlay that shortens what waits")
    parser.add_argument(
        "--set",
        type=_setting,
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="of server in the config, such as lame_duck_s=2; repeatable",
    )
    parser.add_argument("--out", type=Path, help="file for the report; default is stdout")
    given = parser.parse_args(arguments)
    options = Options(
        rollouts=given.rollouts,
        drains=given.drains,
        kills=given.kills,
        failed_releases=given.failed_releases,
        replicas=given.replicas,
        rate_per_s=given.rate,
        max_delay_s=given.max_delay,
        seed=given.seed,
        quick=given.quick,
        settings=dict(given.set),
        folder=Path(tempfile.mkdtemp(prefix="rollout-")),
    )
    return options, given.out


def _at_least(least: Number, number: Callable[[str], Number]) -> Callable[[str], Number]:
    """What reads a number that is no smaller."""

    def read(text: str) -> Number:
        if not (value := number(text)) >= least:
            raise argparse.ArgumentTypeError(f"expected at least {least}, given {text}")
        return value

    read.__name__ = "number"  # for what argparse says of a text that is none
    return read


def _setting(text: str) -> tuple[str, float | str]:
    key, _, value = text.partition("=")
    try:
        return key, float(value)
    except ValueError:
        return key, value


async def _until_signal(options: Options) -> Findings:
    """SIGTERM ends it as Ctrl-C does: with all its pods."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    began_s = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began_s:7.1f} {text}", file=sys.stderr, flush=True)

    return await run(options, say)


def _sorted(error: BaseException) -> tuple[list[str], list[BaseException]]:
    """What was to be expected, in words, and what was not."""
    if not isinstance(error, BaseExceptionGroup):
        return ([str(error)], []) if isinstance(error, _EXPECTED) else ([], [error])
    sorted_ = [_sorted(one) for one in error.exceptions]
    return [text for texts, _ in sorted_ for text in texts], [one for _, rest in sorted_ for one in rest]


def _failed(texts: Sequence[str], options: Options) -> int:
    for text in texts:
        print(f"error: {text}", file=sys.stderr)
    print(f"logs: {options.folder}", file=sys.stderr)
    return 1


def _write(findings: Findings, out: Path | None) -> None:
    if out is None:
        print(markdown(findings), end="")
    else:
        out.write_text(markdown(findings))


if __name__ == "__main__":
    sys.exit(main())
