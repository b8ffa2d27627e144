"""Free memory of the machine and of the control group, from trees of files made for the test."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.model.placement import FreeMemory
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve_worker.memory.arena import Arena, OutOfMemory
from gpuserve_worker.memory.segments import available_nbytes

GIB = 1 << 30


def written(root: Path, files: dict[str, str]) -> str:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return str(root)


def meminfo(nbytes: int) -> dict[str, str]:
    text = f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable:   {nbytes // 1024} kB\nBuffers: 1 kB\n"
    return {"proc/meminfo": text}


@pytest.mark.parametrize(
    ("group", "nbytes"),
    [
        ({}, GIB),
        ({"memory.max": "max\n", "memory.current": "5\n"}, GIB),  # a group without limit does not count
        ({"memory.max": "5\n", "memory.current": "9\n"}, 0),  # a group over its limit has nothing
    ],
)
def test_a_machine_alone_or_with_a_group(tmp_path: Path, group: dict[str, str], nbytes: int) -> None:
    files = {**meminfo(GIB), **{f"sys/fs/cgroup/{name}": text for name, text in group.items()}}
    assert available_nbytes(written(tmp_path, files)) == nbytes


@pytest.mark.parametrize(
    ("limit", "usage"),
    [
        ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
        ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ],
)
def test_the_group_counts_where_it_has_less(tmp_path: Path, limit: str, usage: str) -> None:
    files = {**meminfo(8 * GIB), limit: f"{2 * GIB}\n", usage: f"{GIB}\n"}
    assert available_nbytes(written(tmp_path, files)) == GIB


@pytest.mark.parametrize(("limit_gib", "available_gib"), [(94, 1), (96, 95)])
def test_a_machine_below_the_limit_grows(tmp_path: Path, limit_gib: int, available_gib: int) -> None:
    """The machine has 95.4 GiB, of which 1 GiB is available now."""
    group = {"memory.max": f"{limit_gib * GIB}\n", "memory.current": f"{GIB}\n"}
    files = {**meminfo(GIB), **{f"sys/fs/cgroup/{name}": text for name, text in group.items()}}
    assert available_nbytes(written(tmp_path, files)) == available_gib * GIB


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
def test_page_cache_is_not_in_use(
    tmp_path: Path, folder: str, files: tuple[str, str], statistics: str
) -> None:
    limit, usage = (f"{folder}/{name}" for name in files)
    told = {limit: f"{GIB}\n", usage: f"{GIB - 100}\n", f"{folder}/memory.stat": statistics.format(GIB // 2)}
    assert available_nbytes(written(tmp_path, told)) == GIB // 2 + 107


@pytest.mark.parametrize(
    ("mount", "files", "line"),
    [
        ("sys/fs/cgroup", ("memory.max", "memory.current"), "0::/system.slice/own.service"),
        (
            "sys/fs/cgroup/memory",
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            "5:cpu:/\n4:hugetlb,memory:/system.slice/own.service\n0::/elsewhere",
        ),
    ],
)
def test_a_service_is_in_a_group_further_down_and_those_above_it_count(
    tmp_path: Path, mount: str, files: tuple[str, str], line: str
) -> None:
    """As systemd has them on a machine without containers."""

    def group(path: str, limit: int) -> dict[str, str]:
        return {f"{mount}/{path}{files[0]}": f"{limit}\n", f"{mount}/{path}{files[1]}": f"{GIB}\n"}

    own = group("system.slice/own.service/", 2 * GIB)
    above = group("system.slice/", 3 * GIB)
    others = group("system.slice/other.service/", GIB) | group("elsewhere/", GIB)
    told = {**own, **above, **others, "proc/self/cgroup": f"{line}\n"}
    assert available_nbytes(written(tmp_path / "own", told)) == GIB
    told |= group("system.slice/", GIB + 5)
    assert available_nbytes(written(tmp_path / "above", told)) == 5


@pytest.mark.parametrize("path", ["/kubepods/pod1/container1", "/../../kubepods/pod1"])
def test_a_container_sees_its_own_group_at_the_root(tmp_path: Path, path: str) -> None:
    """Its path is that on the machine, or one out of its namespace."""
    v1 = "sys/fs/cgroup/memory/memory"
    told = {
        f"{v1}.limit_in_bytes": f"{2 * GIB}",
        f"{v1}.usage_in_bytes": f"{GIB}",
        "proc/self/cgroup": f"3:memory:{path}\n",
    }
    assert available_nbytes(written(tmp_path, told)) == GIB


def test_nothing_told_and_no_limit_of_v1_are_none(tmp_path: Path) -> None:
    assert available_nbytes(str(tmp_path)) is None
    v1 = "sys/fs/cgroup/memory/memory"
    told = {f"{v1}.limit_in_bytes": "9223372036854771712\n", f"{v1}.usage_in_bytes": "5\n"}
    assert available_nbytes(written(tmp_path, told)) is None


def test_bodies_leave_as_much_as_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    left = 128 << 20

    def available() -> int:
        return left - arena.statistics().nbytes

    monkeypatch.setattr("gpuserve_worker.memory.arena.available_nbytes", available)
    arena = Arena(1 << 62, lambda *_: None, lambda _: None)
    body = arena.claim(96 << 20)
    assert body is not None
    assert body.reserve(48 << 20) == 48 << 20
    with pytest.raises(OutOfMemory, match="are to be left"):
        body.reserve(80 << 20)
    batch = arena.allocate(16 << 20)
    for one in (body, batch):
        one.free()
    arena.close()


def test_an_arena_refuses_what_the_machine_has_not() -> None:
    arena = Arena(1 << 62, lambda *_: None, lambda _: None)
    with pytest.raises(OutOfMemory, match="are available"):
        arena.allocate(1 << 60)
    assert arena.statistics().segments == 0
    arena.close()


# ---- free memory -----------------------------------------------------------------------------


def model(*devices: str, nbytes: int = 0) -> ModelSpec:
    instances = tuple(InstanceSpec(f"{place}", one, {}) for place, one in enumerate(devices))
    return ModelSpec(name="m", inputs=(), outputs=(), instances=instances, memory_nbytes=nbytes)


def test_of_the_drivers_figure_and_the_expected_memory_the_larger_counts() -> None:
    sizes = {"cuda:0": (80 * GIB, 60 * GIB), "cuda:1": (80 * GIB, 79 * GIB)}
    assert FreeMemory(sizes, []).choose(GIB) == "cuda:1"
    assert FreeMemory(sizes, [model("cuda:1", nbytes=30 * GIB)]).choose(GIB) == "cuda:0"
    # Loaded models are in both figures, and count once.
    assert FreeMemory(sizes, [model("cuda:0", nbytes=20 * GIB)]).choose(GIB) == "cuda:1"
    assert FreeMemory(sizes, [model("cuda:1+cuda:0", nbytes=40 * GIB)]).choose(GIB) == "cuda:0"


def test_without_figures_of_the_driver_the_fewest_expected_bytes_count() -> None:
    sizes = {"cuda:0": (None, None), "cuda:1": (None, None)}
    room = FreeMemory(sizes, [model("cuda:0")])
    assert [room.choose(GIB) for _ in range(4)] == ["cuda:1", "cuda:0", "cuda:1", "cuda:0"]
    assert FreeMemory({}, []).choose(GIB) is None


@given(st.lists(st.integers(0, 64), min_size=1, max_size=8), st.lists(st.integers(1, 16), max_size=40))
def test_no_device_is_chosen_while_another_has_more(free: list[int], wanted: list[int]) -> None:
    left = {f"cuda:{number}": nbytes for number, nbytes in enumerate(free)}
    room = FreeMemory({device: (64, nbytes) for device, nbytes in left.items()}, [])
    for nbytes in wanted:
        device = room.choose(nbytes)
        assert device is not None
        assert left[device] == max(left.values())
        left[device] -= nbytes
