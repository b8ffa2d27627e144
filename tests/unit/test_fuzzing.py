"""``scripts/fuzz`` in its short form: a little of each target, and all inputs that have failed once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from exploring import examples
from fuzzing import targets
from fuzzing.__main__ import main
from hypothesis import strategies as st

KEPT = list(targets.kept())


@pytest.mark.parametrize("target", targets.TARGETS)
def test_a_little_of_each_target(target: str) -> None:
    found = targets.explore(target, 0, examples(90))
    assert found is None, f"{found.data!r} fails: {found.error!r}"


@pytest.mark.parametrize(("target", "path"), KEPT, ids=[f"{target}-{path.name}" for target, path in KEPT])
def test_what_has_failed_once(target: str, path: Path) -> None:
    targets.TARGETS[target].check(path.read_bytes())


def test_what_fails_is_made_small_printed_and_kept(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(data: bytes) -> None:
        assert b"a" not in data

    monkeypatch.setattr(targets, "CORPUS", tmp_path)
    monkeypatch.setitem(
        targets.TARGETS, "letters", SimpleNamespace(INPUTS=st.text("ab").map(str.encode), check=check)
    )
    assert main(["--minutes", "0", "--targets", "letters", "--seed", "3"]) == 1
    assert "letters, seed 3000000: kept as" in capsys.readouterr().out
    assert [path.read_bytes() for _, path in targets.kept()] == [b"a"]
