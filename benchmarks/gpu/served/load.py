"""A server under a closed loop: starts the load clients and adds up what they have seen."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks.gpu.running.section import SectionFailed
from benchmarks.servers import RunningServer

_GRACE_S: Final = 90.0
#: CUDA's contexts take long to open, and a load client needs none.
_NO_GPU: Final = {"CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a closed loop has seen."""

    answers_per_s: float
    median_latency_s: float


def loaded(one: RunningServer, messages: Sequence[bytes], seconds: float, clients: int = 1) -> Loaded:
    """Keep each message under way for this long; ``clients`` processes share them.

    Raises:
        SectionFailed: a call failed.
    """
    with tempfile.TemporaryDirectory(prefix="gpu-load-") as folder:
        files = [Path(folder) / f"{index}.request" for index in range(len(messages))]
        for file, message in zip(files, messages, strict=True):
            file.write_bytes(message)
        running = [_start(one, seconds, files[index::clients]) for index in range(min(clients, len(files)))]
        seen = [_end(process, seconds) for process in running]
    latencies_s = [latency_s for document in seen for latency_s in document["latencies_s"]]
    return Loaded(sum(document["answers_per_s"] for document in seen), median(latencies_s))


def _start(one: RunningServer, seconds: float, files: Sequence[Path]) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "benchmarks.gpu.served.load_client", str(one.ports.grpc), str(seconds)]
    return subprocess.Popen(
        [*command, *map(str, files)],
        env={**os.environ, **_NO_GPU},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _end(process: subprocess.Popen[str], seconds: float) -> dict[str, Any]:
    try:
        output, log = process.communicate(timeout=seconds + _GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        raise SectionFailed(f"the load did not end in {seconds + _GRACE_S:.0f} s") from None
    if process.returncode:
        raise SectionFailed(f"the load failed: {log.strip()[-500:]}")
    document: dict[str, Any] = json.loads(output)
    return document
