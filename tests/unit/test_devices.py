"""Which devices there are, from directories that look like those of a machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpuserve.devices import available_devices, check_device
from gpuserve.errors import DeviceError


def machine(root: Path, nodes: tuple[str, ...] = (), listed: tuple[str, ...] = ()) -> Path:
    (root / "dev").mkdir()
    for node in nodes:
        (root / "dev" / node).touch()
    for bus in listed:
        (root / "proc/driver/nvidia/gpus" / bus).mkdir(parents=True)
    return root


@pytest.mark.parametrize(
    ("nodes", "listed", "count"),
    [
        ((), (), 0),
        (("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"), (), 2),
        ((), ("0000:01:00.0",), 1),
        (("nvidia3", "nvidiactl"), ("0000:01:00.0", "0000:02:00.0"), 1),
        (("dxg",), (), 1),
    ],
)
def test_gpus_are_counted(
    tmp_path: Path, nodes: tuple[str, ...], listed: tuple[str, ...], count: int
) -> None:
    devices = available_devices(machine(tmp_path, nodes, listed), {})
    assert devices == ["cpu", *(f"cuda:{index}" for index in range(count))]


@pytest.mark.parametrize(
    ("variable", "count"),
    [("0,1", 2), ("1", 1), ("", 0), ("-1", 0), ("0,7,1", 1), ("GPU-5ae1, MIG-77", 2), ("NoDevFiles", 0)],
)
def test_cuda_visible_devices_is_honoured(tmp_path: Path, variable: str, count: int) -> None:
    root = machine(tmp_path, ("nvidia0", "nvidia1"))
    assert len(available_devices(root, {"CUDA_VISIBLE_DEVICES": variable})) == 1 + count


def test_an_absent_device_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(DeviceError, match="no device 'cuda:2', only cpu, cuda:0"):
        check_device("cuda:2", ["cpu", "cuda:0"])


def test_the_cpu_is_always_there() -> None:
    assert available_devices(Path("/nonexistent"), {"CUDA_VISIBLE_DEVICES": "0"}) == ["cpu"]
    check_device("cpu")
