"""Which models a changed file touches, and which files are the user's."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import numpy as np

import gpuserve_worker
from gpuserve.config.fingerprints import folders_in, package_folders, sources_fingerprint
from gpuserve.supervisor.reload.file_polling import (
    ChangeDetector,
    DetectedChanges,
    FollowedFiles,
    ImportedFile,
    SourceFolder,
)
from gpuserve_worker.execution.lifecycle import user_files


def test_the_files_of_a_model_are_those_of_its_last_two_loads() -> None:
    followed = FollowedFiles()
    followed.add_imports("m", 1, 1, ["/m/a.py", "/m/old.py"])
    followed.add_imports("m", 1, 2, ["/m/a.py"])
    followed.add_imports("m", 1, 2, ["/m/late.py"])
    followed.add_imports("n", 1, 3, ["/n/n.py", "/m/a.py"])
    assert followed.files("m") == {"/m/a.py", "/m/old.py", "/m/late.py"}
    followed.add_imports("m", 1, 4, ["/m/a.py"])
    assert followed.files("m") == {"/m/a.py", "/m/late.py"}
    assert followed.folders() == {"/m", "/n"}
    touched = {one.model for one in followed.all() if one.path == "/m/a.py"}
    assert touched == {"m", "n"}


def test_versions_of_a_model_do_not_count_against_each_other() -> None:
    followed = FollowedFiles()
    for version in (1, 2, 3):
        followed.add_imports("m", version, version, [f"/m/{version}.py"])
    assert followed.files("m") == {"/m/1.py", "/m/2.py", "/m/3.py"}


def test_what_a_broken_model_lacks_is_looked_for_in_its_folders_alone() -> None:
    followed = FollowedFiles()
    followed.add_imports("m", 1, 1, ["/m/a.py"])
    followed.add_imports("n", 1, 2, ["/m/n.py", "/m/a.py"])
    followed.mark_failed(["m"], followed.sources(["m", "n"], ["/config"]))
    folders = {one for one in followed.all() if isinstance(one, SourceFolder)}
    others = frozenset({"/m/n.py"})
    assert folders == {SourceFolder("m", "/m", others), SourceFolder("m", "/config", others)}
    followed.mark_loaded(["m"])
    assert {type(one) for one in followed.all()} == {ImportedFile}


def test_what_is_followed_later_has_not_changed_by_that() -> None:
    detector = ChangeDetector({"": 0})
    detector.add({"a": 1})
    assert detector.poll({"": 0, "a": 1}) == DetectedChanges(frozenset(), False)
    detector.poll({"": 0, "a": 2})
    detector.add({"a": 5})  # known already: the change still counts
    assert detector.poll({"": 0, "a": 2}) == DetectedChanges(frozenset({"a"}), False)
    detector.retain(lambda key: key == "")
    assert "a" not in detector
    assert detector.poll({"": 0}) == DetectedChanges(frozenset(), False)


def test_the_users_files_are_those_that_nobody_installed(tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    installed = tmp_path / "venv" / "lib" / "site-packages" / "one.py"
    installed.parent.mkdir(parents=True)
    for path in (own, installed):
        path.touch()
    (tmp_path / "data.txt").touch()
    others = [np.__file__, gpuserve_worker.__file__, f"{sysconfig.get_path('stdlib')}/os.py", sys.executable]
    files = [
        str(own),
        str(installed),
        *others,
        str(tmp_path / "gone.py"),
        str(tmp_path / "data.txt"),
        str(own),
    ]
    assert user_files(files) == [str(own)]


def test_an_import_may_find_the_python_files_of_a_folder_and_of_its_packages(tmp_path: Path) -> None:
    for name in ("package", "__pycache__", "venv", "with-dash"):
        (tmp_path / name).mkdir()
    (tmp_path / "venv" / "pyvenv.cfg").touch()
    assert package_folders(str(tmp_path)) == [str(tmp_path / "package")]
    seen = [sources_fingerprint(str(tmp_path))]
    (tmp_path / "package" / "weights.bin").touch()
    assert sources_fingerprint(str(tmp_path)) == seen[0]
    for path in (tmp_path / "a.py", tmp_path / "package" / "b.py"):
        path.touch()
        assert sources_fingerprint(str(tmp_path)) not in seen
        seen.append(sources_fingerprint(str(tmp_path)))
    assert sources_fingerprint(str(tmp_path), {str(tmp_path / "package" / "b.py")}) == seen[1]
    assert folders_in(str(tmp_path / "package")) == [str(tmp_path / "package")]
