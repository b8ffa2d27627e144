"""From the devices that models name to those that their instances get, or to what is said instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuserve.core.errors import DeviceError
from gpuserve.devices.inventory import NOT_INSTALLED, DriverReader, Inventory, visible_devices
from gpuserve.devices.machine import EXCLUSIVE, PROHIBITED, Gpu, Machine, MigInstance, NvidiaDriver
from gpuserve.devices.placement import ANYWHERE, Placement
from gpuserve.model.placement import ServerDevices, missing_library
from gpuserve.model.spec import InstanceSpec, ModelSpec
from gpuserve_worker.protocol.tensor import TensorSpec

A, B = "GPU-aaaa1111-0000-4000-8000-000000000001", "GPU-aabb2222-0000-4000-8000-000000000002"
M, N = "MIG-cccc3333-0000-5000-8000-000000000003", "MIG-cddd4444-0000-5000-8000-000000000004"
GPU_A, GPU_B = Gpu(0, A, numa_node=1, cpus=(4, 5)), Gpu(1, B)
IN_PARTS = Gpu(2, "GPU-cc", in_mig_mode=True, mig=(MigInstance(M), MigInstance(N)))
DRIVER = NvidiaDriver("580.65.06", "13.0")


class Look(DriverReader):
    """Looks at a machine that is made up; each look takes the next one."""

    def __init__(self, *machines: Machine, variable: str | None = None) -> None:
        super().__init__()
        self._machines = list(machines)
        self._variable = variable
        self.count = 0

    def read(self) -> Inventory:
        self.count += 1
        machine = self._machines[min(self.count, len(self._machines)) - 1]
        return Inventory(machine, visible_devices(machine.gpus, self._variable), self._variable)


def devices(*gpus: Gpu, variable: str | None = None, shortage: str = "", **more: Any) -> ServerDevices:
    return ServerDevices(Look(Machine(DRIVER, gpus, shortage), variable=variable), **more)


def model(*names: str, source: dict[str, Any] | None = None, **more: Any) -> ModelSpec:
    """A model with an instance for each device, named as a config file's are."""
    instances = tuple(
        InstanceSpec(f"{name}#{number}", name, source or {}) for number, name in enumerate(names)
    )
    return ModelSpec("m", (), (), 0, instances, **more)


def placed(known: ServerDevices, *names: str, **more: Any) -> Sequence[InstanceSpec]:
    (spec,) = known.place([model(*names, **more)])
    return spec.instances


def refusal(known: ServerDevices, name: str) -> str:
    with pytest.raises(DeviceError) as raised:
        known.place([model(name)])
    return str(raised.value).removeprefix("model 'm': ")


# ---- which instance goes where ----------------------------------------------------------------


def test_every_gpu_gets_an_instance_and_names_are_by_device() -> None:
    instances = placed(devices(GPU_A, GPU_B), "cuda:*", "cpu", "cuda:*", "GPU-AABB", "cuda:1")
    assert [(one.name, one.placement.gpu_uuids) for one in instances] == [
        ("cuda:0#0", (A,)), ("cuda:1#0", (B,)), ("cpu#0", ()), ("cuda:0#1", (A,)), ("cuda:1#1", (B,)),
        ("cuda:1#2", (B,)), ("cuda:1#3", (B,)),
    ]  # fmt: skip
    assert {one.device for one in instances} == {"cpu", "cuda:0", "cuda:1"}


def test_instances_that_are_numbers_stay_numbers() -> None:
    spec = dataclasses.replace(
        model(), instances=(InstanceSpec("0", "cuda:*", {}), InstanceSpec("1", "cpu", {}))
    )
    (new,) = devices(GPU_A, GPU_B).place([spec])
    assert [(one.name, one.device) for one in new.instances] == [
        ("0", "cuda:0"),
        ("1", "cuda:1"),
        ("2", "cpu"),
    ]


def test_a_gpu_in_parts_counts_as_its_parts() -> None:
    known = devices(GPU_A, IN_PARTS)
    assert [(one.device, one.placement.visible) for one in placed(known, "cuda:*")] == [
        ("cuda:0", A), ("cuda:1", M), ("cuda:2", N),
    ]  # fmt: skip
    assert placed(known, "MIG-cd")[0].name == "cuda:2#0"


def test_a_worker_sees_its_gpu_and_stays_beside_it() -> None:
    (instance,) = placed(devices(GPU_A), "cuda:0")
    nodes = instance.placement.numa_nodes
    assert nodes in {(1,), ()}, "a container may forbid to choose memory"
    assert instance.placement == Placement((A,), A, (4, 5), nodes)
    assert instance.placement.environment() == {"CUDA_VISIBLE_DEVICES": A, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert instance.placement.numa_node == (1 if nodes else -1)


def test_affinity_is_switched_off_or_not_known() -> None:
    assert placed(devices(GPU_A, numa_affinity=False), "cuda:0")[0].placement == Placement((A,), A)
    assert placed(devices(GPU_B), "cuda:0")[0].placement == Placement((B,), B)
    assert Placement().numa_node == -1


def test_a_process_has_several_gpus_in_the_order_of_their_names() -> None:
    known = devices(GPU_A, GPU_B)
    first, second = placed(known, "cuda:1+cuda:0", "cuda:0+GPU-AABB")
    assert (first.name, first.device, first.first_device) == ("cuda:1+cuda:0#0", "cuda:1+cuda:0", "cuda:1")
    assert first.placement == Placement((B, A), f"{B},{A}")
    assert second.placement.environment()["CUDA_VISIBLE_DEVICES"] == f"{A},{B}"
    assert second.device == "cuda:0+cuda:1"
    assert refusal(known, "cuda:1+GPU-aabb") == (
        "expected different GPUs for one process, 'cuda:1+GPU-aabb' names one of them twice"
    )
    assert refusal(known, "cuda:0+cuda:2").startswith("this machine has no device 'cuda:2', only cpu, cuda:0")


def test_a_worker_without_a_gpu_is_left_alone() -> None:
    assert ANYWHERE.environment() == {}
    look = Look(Machine())
    spec = model("cpu", "cpu")
    assert ServerDevices(look).place([spec], again=True) == [spec]
    assert look.count == 0


def test_a_thread_has_the_gpus_of_its_process() -> None:
    (instance,) = placed(devices(GPU_A), "cuda:0", source={"object": print})
    assert (instance.device, instance.placement) == ("cuda:0", Placement((A,)))
    assert instance.placement.environment() == {}


def test_what_is_placed_stays_placed() -> None:
    known = devices(GPU_A, GPU_B)
    first = known.place([model("cuda:1")])
    assert known.place(first, again=True) == first


def test_another_look_finds_what_is_new_and_keeps_the_numbers() -> None:
    look = Look(Machine(DRIVER, (GPU_A, GPU_B)), Machine(DRIVER, (Gpu(0, B), Gpu(1, "GPU-new"))))
    known = ServerDevices(look)
    assert len(placed(known, "cuda:*")) == 2
    (spec,) = known.place([model("cuda:*")], again=True)
    found = [(one.device, one.placement.gpu_uuids) for one in spec.instances]
    assert found == [("cuda:1", (B,)), ("cuda:2", ("GPU-new",))]
    assert refusal(known, "cuda:0").startswith("this machine has no device 'cuda:0', only cpu, cuda:1")


def test_a_model_has_only_so_many_instances() -> None:
    with pytest.raises(DeviceError, match=r"^model 'm': its instances on every GPU are 258, but a model may"):
        devices(GPU_A, GPU_B).place([model(*["cuda:*"] * 129)])


# ---- what was found and what is missing -------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "variable", "text"),
    [
        (Machine(), None, "no NVIDIA driver was found"),
        (Machine(shortage=NOT_INSTALLED), None, "no NVIDIA driver was found"),
        (
            Machine(idle_gpus=("0000:17:00.0",)),
            None,
            "1 NVIDIA GPU on the PCI bus, but no NVIDIA driver that serves it",
        ),
        (
            Machine(DRIVER),
            None,
            "the NVIDIA driver 580.65.06 was found, but no GPU: it has none for this process",
        ),
        (
            Machine(NvidiaDriver(), shortage="NVML failed: Unknown Error"),
            None,
            "the NVIDIA driver was found, but no GPU: NVML failed: Unknown Error",
        ),
        (Machine(DRIVER, (GPU_A, GPU_B)), "", "CUDA_VISIBLE_DEVICES ('') leaves none of 2 GPUs"),
        (
            Machine(DRIVER, (Gpu(0, A, in_mig_mode=True),)),
            None,
            "1 GPU in MIG mode, without any MIG instance",
        ),
    ],
)
@pytest.mark.parametrize("name", ["cuda:0", "cuda:*"])
def test_no_gpu_at_all(machine: Machine, variable: str | None, text: str, name: str) -> None:
    known = ServerDevices(Look(machine, variable=variable))
    assert refusal(known, name) == f"this machine has no device {name!r}, only cpu: {text}"


def test_a_number_that_is_not_there() -> None:
    assert refusal(devices(GPU_A), "cuda:1") == f"this machine has no device 'cuda:1', only cpu, cuda:0 ({A})"
    known = devices(GPU_A, GPU_B, variable="1", shortage="GPU 2 does not answer (GPU is lost)")
    assert refusal(known, "cuda:1") == (
        f"this machine has no device 'cuda:1', only cpu, cuda:0 ({B}); CUDA_VISIBLE_DEVICES is '1'; "
        "GPU 2 does not answer (GPU is lost)"
    )


def test_uuids_that_are_not_to_be_had() -> None:
    known = devices(GPU_A, GPU_B, IN_PARTS, variable=f"0,1,{M}")
    assert refusal(known, "GPU-dd").startswith(
        f"this machine has no device 'GPU-dd', only cpu, cuda:0 ({A}), cuda:1"
    )
    several = f"'GPU-aa' is the beginning of several UUIDs, {A}, {B}: write more of it"
    assert refusal(known, "GPU-aa") == several
    assert refusal(known, "GPU-cc") == (
        f"GPU-cc is in MIG mode and cannot be used as a whole: name one of its instances, {M}, {N}"
    )
    assert refusal(known, N) == f"{N} is on this machine, but CUDA_VISIBLE_DEVICES ('0,1,{M}') leaves it out"
    known = devices(GPU_A, GPU_B, variable="1")
    assert refusal(known, A).endswith("CUDA_VISIBLE_DEVICES ('1') leaves it out")
    empty = devices(GPU_A, Gpu(1, B, in_mig_mode=True))
    mig = f"{B} is in MIG mode and cannot be used as a whole, and it has no MIG instances"
    assert refusal(empty, B) == mig


def test_without_nvml_some_things_are_not_known() -> None:
    known = devices(GPU_A, shortage=NOT_INSTALLED)
    assert refusal(known, M) == (
        f"MIG instances such as {M!r} are only found by NVML, but nvidia-ml-py is not installed"
    )
    known = devices(Gpu(0), shortage=NOT_INSTALLED)
    unknown = f"the UUIDs of the GPUs are not known here, so {A!r} cannot be found: {NOT_INSTALLED}"
    assert refusal(known, A) == unknown
    assert placed(known, "cuda:0")[0].placement == Placement((), "0")


def test_a_gpu_that_no_process_may_use() -> None:
    known = devices(dataclasses.replace(GPU_A, compute_mode=PROHIBITED))
    assert refusal(known, "cuda:*") == f"cuda:0 ({A}) is in compute mode 'prohibited': no process may use it"
    assert len(placed(devices(dataclasses.replace(GPU_A, compute_mode=EXCLUSIVE)), "cuda:0", "cuda:0")) == 2


@pytest.mark.parametrize(
    ("array", "memory", "installed", "text"),
    [
        ("numpy", "cpu", (), ""),
        ("cupy", "cpu", (), "array 'cupy' needs cupy, which is not installed: pip install 'gpuserve[cuda"),
        ("torch", "cpu", ("torch",), "array 'torch' needs cupy, which is not installed"),
        ("torch", "cpu", ("cupy",), "array 'torch' needs torch, which is not installed"),
        ("torch", "gpu", ("cupy", "torch"), ""),
        ("cupy", "gpu", (), "input 'x' on a GPU needs cupy, which is not installed: pip install"),
        ("torch", "gpu", (), "input 'x' on a GPU needs cupy, which is not installed: pip install"),
    ],
)
def test_a_library_that_is_missing(array: str, memory: str, installed: tuple[str, ...], text: str) -> None:
    inputs = (TensorSpec("x", "FP32", (1,), memory=memory),)
    spec = dataclasses.replace(model("cuda:0"), inputs=inputs, array=array)
    found = missing_library(spec, installed.__contains__)
    assert found.startswith(text)
    assert bool(found) == bool(text)
    on_cpu = missing_library(dataclasses.replace(spec, instances=model("cpu").instances), ().__contains__)
    assert on_cpu == ("array 'torch' needs torch, which is not installed" if array == "torch" else "")


def test_a_real_look_at_an_empty_machine(tmp_path: Path) -> None:
    look = DriverReader(tmp_path, {"CUDA_VISIBLE_DEVICES": "0"})
    assert look.read().names() == ["cpu"]
