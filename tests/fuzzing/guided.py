"""Coverage-guided fuzzing of one target with atheris, in a process of its own: libFuzzer ends its process.

``python -m fuzzing.guided TARGET FOLDER SECONDS`` mutates the inputs in ``FOLDER/inputs``, keeps there those
that reach new branches, and writes an input that fails into ``FOLDER/findings``.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

#: Inputs that the target's generator makes for an empty folder.
_N_SEEDS = 400
#: An input that takes longer, and a process that takes more, is a finding.
_INPUT_S = 20
_MEMORY_MIB = 3072
#: What libFuzzer or atheris prints before a failure.
_FAILURE = " === "
#: Beyond the time for inputs: to import the target instrumented, and to read its inputs.
_START_S = 300


class Explored(NamedTuple):
    """How many inputs a target has read, the inputs that failed, and what was printed of the failure."""

    n_tried: int
    failed: list[Path]
    report: str


def is_installed() -> bool:
    """Return whether atheris is installed; it has wheels for some machines and Pythons only."""
    return importlib.util.find_spec("atheris") is not None


def explore_guided(target: str, folder: Path, seconds: float) -> Explored:
    """Fuzz a target for so many seconds, or until an input fails. ``folder/log`` has all that is printed."""
    findings = folder / "findings"
    findings.mkdir(parents=True, exist_ok=True)
    before = set(findings.iterdir())
    command = [sys.executable, "-m", "fuzzing.guided", target, str(folder), str(max(1, round(seconds)))]
    path = folder / "log"
    with path.open("w") as log:
        done = subprocess.run(command, timeout=seconds + _START_S, check=False, stdout=log, stderr=log)
    text, failed = path.read_text(errors="replace"), sorted(set(findings.iterdir()) - before)
    if done.returncode and not failed:
        raise RuntimeError(f"{' '.join(command)} ended with status {done.returncode}: {path}")
    tried = re.search(r"stat::number_of_executed_units: (\d+)", text)
    return Explored(int(tried[1]) if tried else 0, failed, text[text.find(_FAILURE) :] if failed else "")


def main(target: str, folder: Path, seconds: int) -> None:
    import atheris

    with atheris.instrument_imports(include=["gpuserve", "gpuserve_worker"]):
        from fuzzing import targets
    check = targets.TARGETS[target].check
    inputs = folder / "inputs"
    inputs.mkdir(parents=True, exist_ok=True)
    if not any(inputs.iterdir()):
        for number, data in enumerate(targets.made(target, _N_SEEDS)):
            (inputs / f"made-{number}").write_bytes(data)
    flags = [
        f"-max_total_time={seconds}",
        f"-timeout={_INPUT_S}",
        f"-rss_limit_mb={_MEMORY_MIB}",
        f"-artifact_prefix={folder / 'findings'}/",
        "-max_len=16384",
        "-print_final_stats=1",
        "-verbosity=0",
    ]
    kept = [str(path) for path in (targets.CORPUS / target,) if path.is_dir()]
    atheris.Setup([sys.argv[0], *flags, str(inputs), *kept], check)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
