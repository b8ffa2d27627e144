"""The pictures of the documentation are those that the code gives now."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree as ET

import pytest

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
