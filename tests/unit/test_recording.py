"""The recording of the README: what a terminal showed becomes rows that come and go; the kept one is real."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import pytest

pytest.importorskip("pyte", reason="pyte, of the extra dev, is not installed")

REPOSITORY = Path(__file__).resolve().parents[2]
RECORDING = REPOSITORY / "docs" / "pictures" / "recording.svg"
RECORD = REPOSITORY / "docs" / "site" / "record.py"
MAX_NBYTES = 300_000
#: In a network of its own no port is taken and no other server is seen.
ALONE = ("unshare", "--map-root-user", "--net", "sh", "-c", 'ip link set lo up && exec "$@"', "sh")


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs" / "site"))
    import recording.animation
    import recording.screens
    import recording.session

    return recording


def rows(
    recording: Any, *pieces: tuple[float, bytes], end_s: float = 9.0
) -> list[tuple[int, str, float, float]]:
    shown = recording.screens.shown_rows(
        [recording.session.Piece(*piece) for piece in pieces], columns=10, rows=3, end_s=end_s
    )
    texts = [
        (one.number, "".join(run.text for run in one.row if run.colour != "cursor"), one.from_s, one.to_s)
        for one in shown
    ]
    return sorted((one for one in texts if one[1]), key=lambda one: (one[2], one[0]))


def test_a_row_is_shown_from_its_piece_until_the_next_one_of_that_row(recording: Any) -> None:
    assert rows(recording, (1.0, b"one"), (2.0, b"\r\ntwo"), (3.0, b"\rtoo\r\n")) == [
        (0, "one", 1.0, 2.0),  # with the cursor
        (0, "one", 2.0, 9.0),
        (1, "two", 2.0, 3.0),
        (1, "too", 3.0, 9.0),
    ]


def test_rows_move_up_where_the_screen_is_full(recording: Any) -> None:
    shown = rows(recording, (1.0, b"\x1b[?25la\r\nb\r\nc"), (2.0, b"\r\nd"))
    assert [(number, text) for number, text, _, to_s in shown if to_s == 9.0] == [
        (0, "b"),
        (1, "c"),
        (2, "d"),
    ]


def test_looks_and_columns_are_kept(recording: Any) -> None:
    piece = recording.session.Piece(0.5, b"\x1b[?25la \x1b[1;32mgo\x1b[0m  b")
    (shown,) = recording.screens.shown_rows([piece], columns=10, rows=2, end_s=1.0)
    assert [(run.column, run.text, run.colour, run.bold) for run in shown.row] == [
        (0, "a", "default", False),
        (2, "go", "green", True),
        (6, "b", "default", False),
    ]


def test_the_animation_is_whole_and_its_last_screen_stays_where_nothing_may_move(recording: Any) -> None:
    pieces = [recording.session.Piece(1.0, b"<a>"), recording.session.Piece(2.0, b"\r<b>")]
    shown = recording.screens.shown_rows(pieces, columns=10, rows=1, end_s=4.0)
    root = ET.fromstring(recording.animation.animated(shown, 10, 1, 4.0, "a & b"))
    groups = root.findall("{*}g")
    assert [group.get("class") for group in groups] == ["r", "r z"]
    assert groups[1].findtext("{*}text") == "<b>"
    assert "@keyframes a0{25.00%{visibility:visible}50.00%{visibility:hidden}}" in (
        root.findtext("{*}style") or ""
    )


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
