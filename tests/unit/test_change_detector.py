"""What detector at models' files tell apart: what has changed, what still does, and what no change is."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from gpuserve.config.fingerprints import file_fingerprint, folder_fingerprint
from gpuserve.supervisor.reload.file_polling import ChangeDetector, DetectedChanges

NOTHING = DetectedChanges(frozenset(), False)


def changed(*models: str) -> DetectedChanges:
    return DetectedChanges(frozenset(models), False)


def test_a_change_counts_once_it_is_seen_twice() -> None:
    detector = ChangeDetector({"": 0, "m": 1, "n": 1})
    assert detector.poll({"": 0, "m": 1, "n": 1}) == NOTHING
    assert detector.poll({"": 0, "m": 2, "n": 1}) == DetectedChanges(frozenset(), True)
    assert detector.poll({"": 0, "m": 3, "n": 1}) == DetectedChanges(frozenset(), True)
    assert detector.poll({"": 0, "m": 3, "n": 1}) == changed("m")
    assert detector.poll({"": 0, "m": 3, "n": 1}) == NOTHING


def test_one_model_does_not_wait_for_another_that_is_being_written() -> None:
    detector = ChangeDetector({"m": 1, "n": 1})
    assert detector.poll({"m": 2, "n": 2}) == DetectedChanges(frozenset(), True)
    assert detector.poll({"m": 2, "n": 3}) == DetectedChanges(frozenset({"m"}), True)
    assert detector.poll({"m": 2, "n": 3}) == changed("n")


def test_what_is_as_it_was_again_has_not_changed() -> None:
    detector = ChangeDetector({"m": 1})
    detector.poll({"m": 2})
    assert detector.poll({"m": 1}) == DetectedChanges(frozenset(), True)
    assert detector.poll({"m": 1}) == NOTHING


def test_models_come_and_go() -> None:
    detector = ChangeDetector({"m": 1})
    assert detector.poll({"n": 1}) == DetectedChanges(frozenset(), True)
    assert detector.poll({"n": 1}) == changed("m", "n")
    assert detector.poll({"n": 1}) == NOTHING
    detector.poll({"m": 1, "n": 1})
    assert detector.poll({"m": 1, "n": 1}) == changed("m")


def set_time(path: Path, seconds: int) -> None:
    os.utime(path, (seconds, seconds))


def test_the_stamp_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    assert file_fingerprint(str(path)) is None
    path.write_text("a")
    set_time(path, 1)
    first = file_fingerprint(str(path))
    assert first == file_fingerprint(str(path))
    path.write_text("ab")
    set_time(path, 1)
    assert file_fingerprint(str(path)) not in {first, None}
    path.write_text("b")
    set_time(path, 2)
    assert file_fingerprint(str(path)) not in {first, None}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model" / "1").mkdir(parents=True)
    (tmp_path / "model" / "1" / "model.py").write_text("a")
    return tmp_path / "model"


def test_the_stamp_of_a_folder_is_that_of_all_in_it(folder: Path) -> None:
    seen = [folder_fingerprint(str(folder))]
    for change in (
        lambda: (folder / "1" / "model.py").write_text("ab"),
        lambda: (folder / "config.pbtxt").write_text(""),
        (folder / "2").mkdir,
        lambda: (folder / "1" / "model.py").rename(folder / "2" / "model.py"),
    ):
        assert folder_fingerprint(str(folder)) == seen[-1]
        change()
        assert folder_fingerprint(str(folder)) not in seen
        seen.append(folder_fingerprint(str(folder)))


def test_what_python_and_tools_leave_in_a_folder_is_no_change(folder: Path) -> None:
    before = folder_fingerprint(str(folder))
    (folder / "1" / "__pycache__").mkdir()
    (folder / "1" / "__pycache__" / "model.pyc").write_text("")
    (folder / ".git").mkdir()
    (folder / "1" / ".model.py.swp").write_text("")
    assert folder_fingerprint(str(folder)) == before


def test_links_are_followed_and_circles_end(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "weights").write_text("a")
    (folder / "2").symlink_to(other)
    (other / "round").symlink_to(folder)
    before = folder_fingerprint(str(folder))
    (other / "weights").write_text("abc")
    assert folder_fingerprint(str(folder)) != before
    assert folder_fingerprint(str(tmp_path / "gone")) == ()
