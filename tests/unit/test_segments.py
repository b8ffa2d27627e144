"""Segments of shared memory: which pages are there, and in which way they are made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gpuserve_worker.memory.segments import UNIT_NBYTES, OwnedSegment, huge_pages_are_given

NBYTES = 5 << 20


@pytest.fixture(params=[False, True])
def segment(request: pytest.FixtureRequest) -> Iterator[OwnedSegment]:
    made = OwnedSegment(NBYTES, in_huge_pages=request.param)
    yield made
    made.close()


def pages_there(segment: OwnedSegment) -> int:
    return os.fstat(segment.fd).st_blocks * 512


def test_what_is_reserved_is_there_and_holds_what_is_written(segment: OwnedSegment) -> None:
    assert segment.missing(0, NBYTES) == (0, NBYTES)
    segment.reserve(0, NBYTES)
    assert (segment.missing(0, NBYTES), segment.reserved_nbytes) == ((NBYTES, NBYTES), NBYTES)
    assert pages_there(segment) >= NBYTES
    values = np.frombuffer(segment.view, np.uint8)
    values[:] = 7
    assert os.pread(segment.fd, 1, NBYTES - 1) == b"\x07"
    del values


def test_a_part_is_reserved_and_the_rest_is_missing(segment: OwnedSegment) -> None:
    segment.reserve(0, UNIT_NBYTES)
    segment.reserve(4 * UNIT_NBYTES, 5 * UNIT_NBYTES)
    assert segment.missing(0, NBYTES) == (UNIT_NBYTES, 4 * UNIT_NBYTES)
    assert segment.missing(4 * UNIT_NBYTES, 4 * UNIT_NBYTES + 1)[0] == 4 * UNIT_NBYTES + 1
    assert segment.reserved_nbytes == 2 * UNIT_NBYTES


def test_nothing_is_there_that_nobody_reserved() -> None:
    segment = OwnedSegment(NBYTES, in_huge_pages=False)
    assert pages_there(segment) == 0
    segment.close()


def test_nobody_can_shrink_it(segment: OwnedSegment) -> None:
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(segment.fd, 1)


@pytest.mark.parametrize(
    ("all_sizes", "one_size", "given"),
    [
        ("always within_size advise [never] deny force", "always [inherit] within_size advise never", False),
        ("always within_size [advise] never deny force", "always [inherit] within_size advise never", True),
        ("always within_size advise [never] deny force", "always inherit within_size [advise] never", True),
        ("[always] within_size advise never deny force", "always inherit within_size advise [never]", False),
        ("always within_size [advise] never deny force", None, True),
        ("always within_size advise never [deny] force", None, False),
        (None, None, False),
    ],
)
def test_whether_the_kernel_gives_huge_pages(
    tmp_path: Path, all_sizes: str | None, one_size: str | None, given: bool
) -> None:
    folder = tmp_path / "sys/kernel/mm/transparent_hugepage"
    (folder / "hugepages-2048kB").mkdir(parents=True)
    for name, text in (("shmem_enabled", all_sizes), ("hugepages-2048kB/shmem_enabled", one_size)):
        if text is not None:
            (folder / name).write_text(f"{text}\n")
    assert huge_pages_are_given(str(tmp_path)) is given
