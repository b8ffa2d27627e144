"""The choice of the device with the most free memory."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gpuserve.model.placement import FreeMemory
from gpuserve.model.spec import InstanceSpec, ModelSpec

GIB = 1 << 30


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
