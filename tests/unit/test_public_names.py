"""What docs/stability.md promises of Python names: the same modules everywhere; no name goes unsaid."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
#: The public names of the last version. One that goes is taken out here with its entry in the changelog, once
#: it was deprecated; new ones are added when a version is released.
RECORD = Path(__file__).parent / "data" / "public_names.txt"


def promised() -> list[str]:
    """The modules in the row of the page that names them."""
    page = (REPOSITORY / "docs" / "stability.md").read_text()
    (row,) = (line for line in page.splitlines() if "`__all__` of" in line)
    return re.findall(r"`(gpuserve[\w.]*)`", row)


def names_of(module: str) -> list[str]:
    return [f"{module}.{name}" for name in importlib.import_module(module).__all__]


def test_the_reference_shows_the_modules_that_are_promised() -> None:
    page = (REPOSITORY / "docs" / "api.md").read_text()
    shown = re.findall(r"made of the code: public names, ([\w.]+)", page)
    assert sorted(shown) == sorted(promised())


def test_no_public_name_goes_unsaid() -> None:
    recorded = RECORD.read_text().split()
    assert len(recorded) > 80
    gone = set(recorded) - {name for module in promised() for name in names_of(module)}
    assert gone == set(), "docs/stability.md says how a name goes"
