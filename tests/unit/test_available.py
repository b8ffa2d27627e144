"""What the machine and the control group say of free memory, on trees of files made for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuserve_worker.memory.arena import Arena, OutOfMemory, available_nbytes

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(nbytes: int) -> dict[str, str]:
    return {"proc/meminfo": f"MemTotal: 99999999 kB\nMemAvailable:   {nbytes // 1024} kB\nBuffers: 1 kB\n"}


def test_machine_alone(tmp_path: Path) -> None:
    assert available_nbytes(write(tmp_path, meminfo(3 * GIB))) == 3 * GIB


@pytest.mark.parametrize(
    ("limit", "usage"),
    [
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ],
)
def test_the_group_counts_where_it_has_less(tmp_path: Path, limit: str, usage: str) -> None:
    files = {**meminfo(8 * GIB), limit: f"{2 * GIB}\n", usage: f"{GIB}\n"}
    assert available_nbytes(write(tmp_path, files)) == GIB


def test_a_group_without_limit_does_not_count(tmp_path: Path) -> None:
    files = {**meminfo(GIB), "sys/fs/cgroup/memory.max": "max\n", "sys/fs/cgroup/memory.current": "5\n"}
    assert available_nbytes(write(tmp_path, files)) == GIB


def test_a_group_over_its_limit_has_nothing(tmp_path: Path) -> None:
    files = {**meminfo(GIB), "sys/fs/cgroup/memory.max": "5\n", "sys/fs/cgroup/memory.current": "9\n"}
    assert available_nbytes(write(tmp_path, files)) == 0


@pytest.mark.parametrize(
    ("folder", "files", "statistics"),
    [
        ("sys/fs/cgroup", ("memory.max", "memory.current"), "anon 9\ninactive_file {}\nactive_file 7\n"),
        (
            "sys/fs/cgroup/memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            "inactive_file 1\nactive_file 1\ntotal_inactive_file {}\ntotal_active_file 7\n",
        ),
    ],
)
def test_page_cache_of_the_group_is_not_in_use(
    tmp_path: Path, folder: str, files: tuple[str, str], statistics: str
) -> None:
    limit, usage = (f"{folder}/{name}" for name in files)
    told = {limit: f"{GIB}\n", usage: f"{GIB - 100}\n", f"{folder}/memory.stat": statistics.format(GIB // 2)}
    assert available_nbytes(write(tmp_path, told)) == GIB // 2 + 107


def test_nothing_told_is_none(tmp_path: Path) -> None:
    assert available_nbytes(tmp_path) is None


def test_an_arena_refuses_what_the_machine_has_not() -> None:
    arena = Arena(1 << 62, lambda *_: None, lambda _: None)
    with pytest.raises(OutOfMemory, match="are available"):
        arena.allocate(1 << 60)
    assert arena.statistics().segments == 0
    arena.close()
