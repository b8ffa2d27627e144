"""``scripts/fuzz`` in its short form: a little of each target, and all inputs that have failed once."""

from __future__ import annotations

import re
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


@pytest.mark.thorough
def test_inputs_are_guided_by_coverage(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("atheris")
    assert main(["--minutes", "0.05", "--targets", "worker-messages", "--mode", "guided"]) == 0
    tried = re.search(r"worker-messages: (\d+) inputs", capsys.readouterr().out)
    assert tried is not None
    assert int(tried[1]) > 100


def test_one_input_is_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "input"
    path.write_bytes(b"no message")
    assert main(["--targets", "worker-messages", "--input", str(path)]) == 0
    with pytest.raises(SystemExit):
        main(["--targets", "nothing", "--input", str(path)])
    assert "no such target: nothing; there are grpc-messages," in capsys.readouterr().err


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
    ((_, kept),) = targets.kept()
    assert kept.read_bytes() == b"a"
    assert main(["--targets", "letters", "--input", str(kept)]) == 1
