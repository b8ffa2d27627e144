"""The kernel's word on changes in folders: what wakes, what does not, and where there is none to be had."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import wait_until

from gpuserve.supervisor.reload.file_polling import FileWatch

#: As many descriptors as there are: the kernel has none for a watch.
STARVED = """
import os, resource, threading
from gpuserve.supervisor.reload.file_polling import FileWatch
import watchfiles

woken = threading.Event()
watch = FileWatch()
watch.open(woken.set)
least = os.dup(0)
os.close(least)
resource.setrlimit(resource.RLIMIT_NOFILE, (least, least))
watch.watch(["."])
assert woken.wait(20.0)
assert watch.has_failed
watch.close()
"""


class Woken:
    def __init__(self) -> None:
        self.times = 0
        self.watch = FileWatch()
        self.watch.open(self._wake)

    def _wake(self) -> None:
        self.times += 1

    def wait_for_more_than(self, times: int) -> None:
        wait_until(lambda: self.times > times, "it wakes")


@pytest.fixture
def woken() -> Iterator[Woken]:
    one = Woken()
    yield one
    one.watch.close()
    assert "gpuserve-watch" not in {thread.name for thread in threading.enumerate()}


def test_changes_in_the_folders_of_now_wake(woken: Woken, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    woken.watch.watch([str(first), str(tmp_path / "gone")])
    woken.wait_for_more_than(0)  # it is watched from now on
    (first / "a.py").write_text("a")
    woken.wait_for_more_than(1)
    woken.watch.watch([str(second)])
    before = woken.times
    woken.wait_for_more_than(before)
    before = woken.times
    (second / "a.py").write_text("a")
    woken.wait_for_more_than(before)


@pytest.mark.thorough
def test_a_folder_that_is_made_again_is_another(woken: Woken, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    woken.watch.watch([str(folder)])
    woken.wait_for_more_than(0)
    folder.rename(tmp_path / "before")
    folder.mkdir()
    woken.watch.watch([str(folder)])
    before = woken.times
    woken.wait_for_more_than(before)
    before = woken.times
    (folder / "a.py").write_text("a")
    woken.wait_for_more_than(before)


@pytest.mark.thorough
def test_where_the_kernel_cannot_watch_that_is_noted(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", STARVED],
        check=False,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert "are polled every second instead" in done.stderr
