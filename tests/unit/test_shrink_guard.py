"""Mappings of files that somebody shrinks, each in a process of its own: a failure here is the end of it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

#: A file of 64 pages that nobody else sees, and a region over it.
_SETTING = """
import faulthandler, gc, mmap, os, signal, sys, threading, time
import numpy as np
from gpuserve_worker.protocol.payloads import Place
from gpuserve_worker.memory.client_regions import RegionError, ClientRegions, SystemRegion
from gpuserve_worker.memory.client_regions import GUARD
PAGE = mmap.PAGESIZE
NBYTES = 64 * PAGE
fd = os.memfd_create("client")
os.ftruncate(fd, NBYTES)
whole = Place(1, 0, NBYTES)
def opened():
    regions = ClientRegions()
    regions.attach(1, fd, 0, NBYTES)
    return regions
"""


def child(program: str, *, timeout_s: float = 20.0) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _SETTING + program]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


def said(program: str) -> list[str]:
    """What a program prints that has to live."""
    done = child(program)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.split()


def test_nobody_dies_of_a_file_that_flips() -> None:
    told = said("""
def flip():
    while not over.is_set():
        os.ftruncate(fd, 0)
        os.ftruncate(fd, NBYTES)
over, heap = threading.Event(), bytearray(NBYTES)
flipping = threading.Thread(target=flip)
flipping.start()
rounds, refused, fine, end = 0, 0, 0, time.monotonic() + 2
while time.monotonic() < end or rounds < 2000:
    rounds += 1
    regions = opened()
    try:
        for _ in range(3):
            heap[:] = regions.view(whole)
            regions.check(whole)
            regions.view(whole)[:] = heap
            np.copyto(np.frombuffer(regions.view(whole), np.float32), 1.0)
            regions.check(whole)
        fine += 1
    except RegionError:
        refused += 1
    regions.close()
over.set()
flipping.join()
print(rounds, refused, fine)
assert len(GUARD._watches) == 0
""")
    rounds, refused, fine = map(int, told)
    assert rounds == refused + fine >= 2000
    assert refused > 0


def test_threads_that_hold_no_lock_of_the_interpreter_live_as_well() -> None:
    assert said("""
regions = opened()
arrays = [np.frombuffer(regions.view(whole), np.float32) for _ in range(4)]
os.ftruncate(fd, 0)
into = [np.empty(NBYTES // 4, np.float32) for _ in arrays]
threads = [threading.Thread(target=np.add, args=(a, 1, b)) for a, b in zip(arrays, into)]
for one in threads: one.start()
for one in threads: one.join()
print(*{float(one) for b in into for one in b})
""") == ["1.0"]


def test_what_was_there_before_the_shrinking_is_refused_and_a_new_region_is_whole_again() -> None:
    assert said("""
regions = opened()
view = regions.view(whole)
os.ftruncate(fd, PAGE)
print(view[PAGE])
os.ftruncate(fd, NBYTES)
try: regions.check(whole)
except RegionError: print("refused")
other = opened()
other.view(whole)[:1] = b"x"
other.check(whole)
print(os.pread(fd, 1, 0).decode())
""") == ["0", "refused", "x"]


def test_a_mapping_is_watched_until_the_last_array_over_it_dies() -> None:
    assert said("""
regions = opened()
kept = np.frombuffer(regions.view(whole), np.uint8)[8:16]
regions.detach(1)
print(len(GUARD._watches))
os.ftruncate(fd, 0)
print(int(kept.sum()))
del kept
print(len(GUARD._watches))
""") == ["1", "0", "0"]


def test_the_address_of_a_mapping_that_is_gone_is_not_guarded() -> None:
    done = child("""
regions = opened()
kept = regions.view(whole)
address = np.frombuffer(kept, np.uint8).ctypes.data
regions.close()
del kept
other = os.memfd_create("other")
os.ftruncate(other, NBYTES)
tried = []
while not tried or np.frombuffer(tried[-1], np.uint8).ctypes.data != address:
    tried.append(mmap.mmap(other, NBYTES))
    assert len(tried) < 1000, "the address is never used again"
os.ftruncate(other, 0)
print("still here", flush=True)
tried[-1][0]
""")
    assert done.stdout == "still here\n"
    assert done.returncode == -signal.SIGBUS


@pytest.mark.parametrize("others", ["", "faulthandler.enable()"], ids=["default", "faulthandler"])
def test_a_signal_elsewhere_still_ends_the_process(others: str) -> None:
    done = child(f"""
{others}
regions = opened()
regions.view(whole)
foreign = os.memfd_create("foreign")
os.ftruncate(foreign, PAGE)
mapped = mmap.mmap(foreign, PAGE)
os.ftruncate(foreign, 0)
def touches(): return mapped[0]
touches()
print("alive")
""")
    assert (done.returncode, done.stdout) == (-signal.SIGBUS, "")
    assert ("Fatal Python error: Bus error" in done.stderr) == bool(others)
    if others:
        first = done.stderr.partition("most recent call first")[2].splitlines()[1]
        assert first.endswith("in touches")


def test_who_survives_a_signal_elsewhere_is_guarded_again() -> None:
    assert said("""
import ctypes
regions = opened()
regions.view(whole)
foreign = os.memfd_create("foreign")
os.ftruncate(foreign, PAGE)
mapped = mmap.mmap(foreign, PAGE)
os.ftruncate(foreign, 0)
# An action of somebody else's, under ours, that mends what it was called for.
GUARD._previous.handler = ctypes.cast(
    mend := ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda _: os.ftruncate(foreign, PAGE)), ctypes.c_void_p
).value
print(mapped[0])
view = regions.view(whole)
os.ftruncate(fd, 0)
print(view[0])
""") == ["0", "0"]


def test_nothing_is_changed_until_a_mapping_is_watched() -> None:
    assert said("""
print(signal.getsignal(signal.SIGBUS) is signal.SIG_DFL)
regions = opened()
print(GUARD._previous is None, len(GUARD._watches))
regions.view(whole)
print(GUARD._previous is None, len(GUARD._watches))
""") == ["True", "True", "0", "False", "1"]
