"""``python -m benchmarks.gpu.running.section_process PLACE SITE RESULT``: one section, a process of its own.

``SITE`` is JSON: the folder, the effort, and whether the stand-in takes the GPU's place. What is found goes
to the file ``RESULT``; stdout and stderr are a log. The exit status says nothing that the file does not. It
ends with the process that started it, however that ends.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import signal
import sys
import traceback
from pathlib import Path
from typing import Final

from benchmarks.gpu.running.section import Effort, Findings, Outcome, SectionFailed, SectionSkipped, Site

_PR_SET_PDEATHSIG: Final = 1


def site_text(site: Site) -> str:
    effort = site.effort
    return json.dumps([str(site.folder), effort.rounds, effort.seconds, effort.largest_nbytes, site.stand_in])


def main(place: str, site: str, result: str) -> int:
    # Its servers are stopped on the way out.
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGTERM), 0, 0, 0)
    folder, rounds, seconds, largest_nbytes, stand_in = json.loads(site)
    findings = Findings(Path(result))
    try:
        module, _, function = place.partition(":")
        run = getattr(importlib.import_module(module), function)
        run(Site(Path(folder), Effort(rounds, seconds, largest_nbytes), stand_in), findings)
        if findings.wrong:
            raise SectionFailed("; ".join(findings.wrong))
    except SectionSkipped as skipped:
        findings.end(Outcome.SKIPPED, str(skipped))
    except Exception as error:  # whatever it is, the other sections go on and the report says it
        traceback.print_exc()
        findings.end(Outcome.FAILED, _sentence(error))
        return 1
    else:
        findings.end(Outcome.DONE)
    return 0


def _sentence(error: Exception) -> str:
    text = str(error) or "no text"
    return text if isinstance(error, SectionFailed) else f"{type(error).__name__}: {text}"


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
