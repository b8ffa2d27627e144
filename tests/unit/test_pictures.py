"""The pictures and the recording of the documentation are those that the code gives now."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree as ET

import pytest
from optional_packages import needs
from present import present

REPOSITORY = Path(__file__).resolve().parents[2]
PICTURES = REPOSITORY / "docs" / "pictures"


@pytest.fixture
def draw(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs" / "site"))
    import draw as module

    return module


def test_the_pictures_are_those_of_the_code(draw: ModuleType) -> None:
    drawn = dict(draw.pictures())
    assert len(drawn) >= 7
    stale = [name for name, text in drawn.items() if (PICTURES / name).read_text() != text]
    assert stale == [], "python docs/site/draw.py draws them anew"


def test_each_picture_is_whole_told_to_who_cannot_see_it_and_shown_in_the_docs(draw: ModuleType) -> None:
    pages = "".join(page.read_text() for page in (REPOSITORY / "docs").rglob("*.md"))
    for name, text in draw.pictures():
        root = ET.fromstring(text)
        assert root.get("aria-label")
        assert f"pictures/{name})" in pages


def test_a_state_that_has_no_place_stops_the_drawing(draw: ModuleType) -> None:
    states: Any = sys.modules["drawing.states"]
    drawn = states.TABLES["states-of-a-gpu"]
    without = drawn._replace(places={name: at for name, at in drawn.places.items() if name != "LOST"})
    with pytest.raises(ValueError, match=r"states without a place.*\['LOST'\]"):
        states.drawn_states(without)
    with pytest.raises(ValueError, match=r"bends of lines that are not there: \[\('LOST', 'SUSPECT'\)\]"):
        states.drawn_states(drawn._replace(bends={("LOST", "SUSPECT"): (1.0, 0.5)}))


@pytest.mark.parametrize(
    ("ask", "what"),
    [
        (("message", "gpuserve_worker.protocol.wire", "Sing"), "has no message Sing"),
        (("program", "gpuserve.api"), "runs nothing"),
        (("file", "models/model_driven.py"), "not there any more"),
    ],
)
def test_a_name_that_the_code_does_not_have_stops_the_drawing(
    draw: ModuleType, ask: tuple[str, ...], what: str
) -> None:
    names: Any = sys.modules["drawing.names"]
    with pytest.raises(LookupError, match=what):
        getattr(names, ask[0])(*ask[1:])


# ---- the recording of the README ----


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
    length = present(re.search(r"animation:([\d.]+)s", svg))
    return float(length[1])


def test_the_kept_recording_is_small_and_shows_the_session() -> None:
    assert 15 < check(RECORDING.read_text()) < 25


@pytest.mark.thorough
@needs("pyte")
def test_it_can_be_recorded_anew(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run([*ALONE, "true"], check=False).returncode:
        pytest.skip("no network of its own can be had here (unshare --net)")
    file = tmp_path / "recording.svg"
    command = [*ALONE, sys.executable, str(RECORD), str(file), "--key-s", "0.002", "--pause-s", "0.3"]
    subprocess.run(command, check=True, timeout=60)
    check(file.read_text())
