"""``python -m benchmarks.profile [--instructions]``: every stage, for batches of 1, 8 and 64 requests.

Instructions come from callgrind, as the difference between a short and a long run: they do not depend on what
else the machine does. They are those of user space; the time has the kernel's share in it.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from typing import Final

BATCHES: Final = (1, 8, 64)
#: Batches of a timed run, by the requests in each.
_TIMED: Final = {1: 20_000, 8: 5_000, 64: 800}
_COUNTED: Final = {1: 1500, 8: 400, 64: 100}
_ENVIRONMENT: Final = {"PYTHONHASHSEED": "0"}


def timed(stage: str, batch: int) -> dict[str, float]:
    """Nanoseconds a request, by the name of the stage."""
    output = _run([sys.executable, "-m", f"benchmarks.profile.{stage}", str(batch), str(_TIMED[batch])])
    found: dict[str, float] = ast.literal_eval(output.strip().splitlines()[-1])
    return found


def counted(stage: str, batch: int) -> float:
    """Instructions a request, of all that the stage's process does."""
    few, many = (_collected(stage, batch, _COUNTED[batch] * times) for times in (1, 3))
    return (many - few) / (2 * _COUNTED[batch] * batch)


def _collected(stage: str, batch: int, batches: int) -> int:
    with tempfile.TemporaryDirectory() as directory:
        out = os.path.join(directory, "callgrind.%p")
        command = ["valgrind", "--tool=callgrind", f"--callgrind-out-file={out}", sys.executable]
        command += ["-m", f"benchmarks.profile.{stage}", str(batch), str(batches)]
        process = subprocess.Popen(
            command, env=os.environ | _ENVIRONMENT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        process.wait()
        with open(os.path.join(directory, f"callgrind.{process.pid}")) as file:
            found = re.search(r"^(?:totals|summary): (\d+)", file.read(), re.MULTILINE)
    assert found is not None, f"callgrind counted nothing of {stage}"
    return int(found[1])


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile")
    parser.add_argument("--instructions", action="store_true", help="count instructions (needs valgrind)")
    chosen = parser.parse_args()
    for stage in ("front", "worker"):
        for batch in BATCHES:
            if chosen.instructions:
                print(f"{stage} batch {batch}: {counted(stage, batch):,.0f} instructions a request")
            else:
                named = " ".join(f"{name} {value:,.0f}" for name, value in timed(stage, batch).items())
                print(f"{stage} batch {batch}: {named} ns a request")


if __name__ == "__main__":
    main()
