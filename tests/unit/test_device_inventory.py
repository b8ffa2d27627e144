"""Which devices there are: from the driver's files, from NVML's answers, and by ``CUDA_VISIBLE_DEVICES``."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuserve.core.errors import DeviceError
from gpuserve.devices.inventory import NOT_INSTALLED, DriverReader, Inventory, read_machine, visible_devices
from gpuserve.devices.machine import Gpu, Machine, MigInstance, NvidiaDriver, cpu_list
from gpuserve.devices.names import check_device_name, likely_device_name

INFORMATION = """Model: \t\t NVIDIA H200
IRQ:   \t\t 200
GPU UUID: \t {uuid}
Bus Type: \t PCIe
Bus Location: \t {bus}
Device Minor: \t {minor}
"""
A, B = "GPU-aaaa1111-0000-4000-8000-000000000001", "GPU-aabb2222-0000-4000-8000-000000000002"
M, N = "MIG-cccc3333-0000-5000-8000-000000000003", "MIG-cddd4444-0000-5000-8000-000000000004"


def no_nvml() -> Any:
    raise ImportError("pynvml")


def machine(root: Path, nodes: tuple[str, ...] = (), **listed: int) -> Path:
    """Files as the driver has them; ``listed`` are GPUs by the bus in their id, with their minor number."""
    (root / "dev").mkdir()
    for node in nodes:
        (root / "dev" / node).touch()
    for bus, minor in listed.items():
        folder = root / f"proc/driver/nvidia/gpus/0000:{bus}:00.0"
        folder.mkdir(parents=True)
        text = INFORMATION.format(uuid=f"GPU-{bus}", bus=f"0000:{bus}:00.0", minor=minor)
        (folder / "information").write_text(text)
    return root


def pci_device(root: Path, bus_id: str, **facts: str) -> None:
    folder = root / "sys/bus/pci/devices" / bus_id
    folder.mkdir(parents=True)
    for name, value in facts.items():
        (folder / name).write_text(f"{value}\n")


@pytest.mark.parametrize(
    ("nodes", "listed", "uuids"),
    [
        ((), {}, []),
        (("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"), {}, ["", ""]),
        ((), {"f1": 0}, ["GPU-f1"]),
        # A container sees the whole list, and the files of its own GPUs.
        (("nvidia3", "nvidiactl"), {"f1": 0, "f2": 3}, ["GPU-f2"]),
        (("nvidia7",), {"f1": 0}, [""]),
        (("dxg",), {}, [""]),
    ],
)
def test_driver_files(
    tmp_path: Path, nodes: tuple[str, ...], listed: dict[str, int], uuids: list[str]
) -> None:
    found = read_machine(machine(tmp_path, nodes, **listed), no_nvml)
    assert [one.uuid for one in found.gpus] == uuids
    assert [one.number for one in found.gpus] == list(range(len(uuids)))
    assert (found.driver is not None) == bool(uuids)
    assert found.shortage == NOT_INSTALLED


def test_a_gpu_by_the_drivers_files(tmp_path: Path) -> None:
    root = machine(tmp_path, ("nvidia0",), f1=0)
    pci_device(root, "0000:f1:00.0", numa_node="1", local_cpulist="2-3,8")
    (root / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 12\n"
    )
    found = read_machine(root, no_nvml)
    gpu = Gpu(0, "GPU-f1", "NVIDIA H200", "0000:f1:00.0", numa_node=1, cpus=(2, 3, 8))
    assert found == Machine(NvidiaDriver("580.65.06"), (gpu,), NOT_INSTALLED)


def test_a_gpu_without_a_driver_is_told(tmp_path: Path) -> None:
    pci_device(tmp_path, "0000:17:00.0", vendor="0x10de", **{"class": "0x030200"})
    pci_device(tmp_path, "0000:18:00.0", vendor="0x8086", **{"class": "0x030000"})
    pci_device(tmp_path, "0000:17:00.1", vendor="0x10de", **{"class": "0x040300"})
    found = read_machine(tmp_path, no_nvml)
    assert (found.driver, found.idle_gpus) == (None, ("0000:17:00.0",))


def test_a_uuid_that_is_not_known_yet_is_none(tmp_path: Path) -> None:
    root = machine(tmp_path, ("nvidia0",), f1=0)
    file = root / "proc/driver/nvidia/gpus/0000:f1:00.0/information"
    file.write_text(INFORMATION.format(uuid="GPU-????????-????-????", bus="", minor=0))
    (gpu,) = read_machine(root, no_nvml).gpus
    assert (gpu.uuid, gpu.name) == ("", "NVIDIA H200")


@pytest.mark.parametrize(
    ("text", "cpus"), [("0-2,8", (0, 1, 2, 8)), ("5", (5,)), ("", ()), ("none", ()), ("1-", ())]
)
def test_cpu_lists(text: str, cpus: tuple[int, ...]) -> None:
    assert cpu_list(text) == cpus


# ---- CUDA_VISIBLE_DEVICES ---------------------------------------------------------------------

GPUS = (Gpu(0, A), Gpu(1, B), Gpu(2, "GPU-cc", in_mig_mode=True, mig=(MigInstance(M), MigInstance(N))))


@pytest.mark.parametrize(
    ("variable", "entries"),
    [
        (None, [A, B, M, N]), ("0,1", [A, B]), ("1,0", [B, A]), ("", []), ("-1", []),
        ("0,7,1", [A]), ("0,0", [A]), (f"0,{A}", [A]), ("GPU-aabb", [B]), ("GPU-aa", []),
        ("GPU-AABB", [B]), ("2", [M]), ("GPU-cc", [M]), (f"{N},{M}", [N, M]), ("MIG-0, 0", []),
        ("NoDevFiles", []),
    ],
)  # fmt: skip
def test_cuda_visible_devices_is_honoured(variable: str | None, entries: list[str]) -> None:
    devices = visible_devices(GPUS, variable)
    assert [one.entry for one in devices] == [one.uuid for one in devices] == entries
    assert [one.name for one in devices] == [f"cuda:{number}" for number in range(len(entries))]


@pytest.mark.parametrize(
    ("variable", "entries"),
    [(None, ["0", "1"]), ("1", ["1"]), ("1,0", ["1", "0"]), ("GPU-5ae1, MIG-77", ["GPU-5ae1", "MIG-77"])],
)
def test_gpus_without_uuids_are_passed_on_by_number(variable: str | None, entries: list[str]) -> None:
    assert [one.entry for one in visible_devices((Gpu(0), Gpu(1)), variable)] == entries
    assert visible_devices((), "GPU-5ae1") == ()


def inventory(*gpus: Gpu) -> Inventory:
    return Inventory(Machine(NvidiaDriver("1"), gpus), visible_devices(gpus, None))


def test_numbers_stay_what_they_were() -> None:
    first = inventory(Gpu(0, A), Gpu(1, B))
    without_first = inventory(Gpu(0, B), Gpu(1, "GPU-new")).numbered_as(first)
    assert [(one.name, one.uuid) for one in without_first.devices] == [("cuda:1", B), ("cuda:2", "GPU-new")]
    assert without_first.names() == ["cpu", "cuda:1", "cuda:2"]
    assert first.numbered_as(first) == first


# ---- a driver that hangs ----------------------------------------------------------------------


def hanging(until: threading.Event) -> Callable[[], Any]:
    def load() -> Any:
        until.wait()
        raise ImportError("pynvml")

    return load


def test_a_driver_that_hangs_is_an_error_and_is_not_asked_again(tmp_path: Path) -> None:
    goes_on = threading.Event()
    look = DriverReader(tmp_path, {}, hanging(goes_on), timeout_s=0.5)
    text = r"^the NVIDIA driver did not answer within 0\.5 s, so it cannot be told which GPUs there are"
    for _ in range(2):
        with pytest.raises(DeviceError, match=text):
            look.read()
    (thread,) = [one for one in threading.enumerate() if one.name == "gpuserve-devices"]
    goes_on.set()
    thread.join()
    assert look.read().names() == ["cpu"]


def test_a_defect_is_raised_as_it_is(tmp_path: Path) -> None:
    def load() -> Any:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        DriverReader(tmp_path, {}, load).read()


# ---- names ------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["cpu", "cuda:0", "cuda:31", "cuda:*", "GPU-5", A, M, "MIG-GPU-5ae/1/0"])
def test_names(text: str) -> None:
    assert check_device_name(text) == text


@pytest.mark.parametrize(
    ("text", "likely"),
    [
        ("gpu0", "cuda:0"), ("CUDA:1", "cuda:1"), ("cuda", "cuda:0"), ("gpu:*", "cuda:*"), ("CPU", "cpu"),
        ("cuda:all", "cuda:*"), ("GPU-", "cuda:0"), ("cuda:01", "cuda:1"), ("tpu", None), ("", None),
        ("GPU-1 2", None),
    ],
)  # fmt: skip
def test_what_is_no_name(text: str, likely: str | None) -> None:
    with pytest.raises(ValueError, match=r"^expected 'cpu', 'auto', 'cuda:0', .* given "):
        check_device_name(text)
    assert likely_device_name(text) == likely
