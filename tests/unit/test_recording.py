"""The recording of the README: what a terminal showed becomes rows that come and go; the kept one is real."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

pytest.importorskip("pyte", reason="pyte, of the extra dev, is not installed")

REPOSITORY = Path(__file__).resolve().parents[2]
RECORDING = REPOSITORY / "docs" / "pictures" / "recording.svg"
RECORD = REPOSITORY / "docs" / "site" / "record.py"
MAX_NBYTES = 300_000
#: In a network of its own no port is taken and no other server is seen.
ALONE = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


def check(svg: str) -> float:
    """The length of a recording in seconds, once it is seen to show what it should."""
    assert len(svg.encode()) < MAX_NBYTES
    texts = [" ".join(group.itertext()) for group in ET.fromstring(svg).findall("{*}g")]
    for said in ("$ gpuserve serve double.py &", "Ready.", "[3.0,4.0]", "$ gpuserve status", "SERVING"):
        assert any(said in text for text in texts), said
    length = re.search(r"animation:([\d.]+)s", svg)
    assert length is not None
    return float(length[1])


def test_the_kept_recording_is_small_and_shows_the_session() -> None:
    assert 15 < check(RECORDING.read_text()) < 25


@pytest.mark.thorough
def test_it_can_be_recorded_anew(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run([*ALONE, "true"], check=False).returncode:
        pytest.skip("no network of its own can be had here (unshare --net)")
    file = tmp_path / "recording.svg"
    command = [*ALONE, sys.executable, str(RECORD), str(file), "--key-s", "0.002", "--pause-s", "0.3"]
    subprocess.run(command, check=True, timeout=60)
    check(file.read_text())
