"""Which GPU a worker gets, seen from inside it; what ``gpuserve devices``, ``check`` and ``serve`` say."""

from __future__ import annotations

import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from gpu_machine import GPU_0, GPU_1, Gpu, GpuMachine, Mig, RealMachine
from operated import MODELS, OperatedServer
from processes import finished, wait_until
from serving import FREE_PORTS, GPUSERVE

A, B = GPU_0.uuid, GPU_1.uuid
M, N = Mig("MIG-00000000-0000-5000-8000-00000000000c"), Mig("MIG-00000000-0000-5000-8000-00000000000d")
IN_PARTS = Gpu("GPU-00000000-0000-4000-8000-00000000000e", pci_bus_id="00000000:99:00.0", mig=(M, N))


@pytest.fixture
def views(tmp_path: Path) -> Path:
    """Where the workers write down what they see."""
    directory = tmp_path / "views"
    directory.mkdir()
    return directory


def on(machine: GpuMachine | RealMachine, patch: pytest.MonkeyPatch, **more: str) -> None:
    """Start processes on that machine from here on."""
    for name, value in (machine.environ | more).items():
        patch.setenv(name, value)


def config(tmp_path: Path, views: Path, *devices: str | list[str], keys: Any = None, **server: Any) -> Path:
    """A model that has these devices and tells what it sees there."""
    model = {
        "name": "m",
        "callable": f"{MODELS / 'device_view.py'}:View",
        "kwargs": {"directory": str(views)},
        "instances": [{"device": one} for one in devices],
        "inputs": [{"name": "x", "dtype": "float32", "shape": [1]}],
        "outputs": [{"name": "seen", "dtype": "bytes", "shape": [1]}],
        "max_batch_size": 1,
        **(keys or {}),
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"server": server, "models": [model]}))
    return path


def seen(views: Path) -> dict[str, Any]:
    """What each worker saw, by the name of its instance."""
    return {one.name: json.loads(one.read_text()) for one in views.iterdir()}


def hexadecimal(uuid: str) -> str:
    """A UUID as CUDA gives its bytes."""
    return uuid.partition("-")[2].replace("-", "")


def gpuserve(*arguments: str) -> tuple[int, str, str]:
    done = finished([GPUSERVE, *arguments])
    return done.returncode, done.stdout, done.stderr


def inventory() -> Any:
    code, out, err = gpuserve("devices", "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


# ---- what a worker sees -----------------------------------------------------------------------


def test_each_worker_sees_its_own_gpu_and_calls_it_cuda_0(
    two_gpus: GpuMachine, tmp_path: Path, views: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpus = tuple(sorted(os.sched_getaffinity(0)))
    two_gpus.change_gpu(A, cpus=(cpus[0], 4000), speed=1)
    two_gpus.change_gpu(B, cpus=(cpus[-1],), numa_node=None, speed=2)
    on(two_gpus, monkeypatch)
    with OperatedServer(config(tmp_path, views, "cuda:*", "cuda:1", "cpu")).until_killed() as server:
        found = seen(views)
        assert set(found) == {"cuda:0#0", "cuda:1#0", "cuda:1#1", "cpu#0"}
        for name, uuid in (("cuda:0#0", A), ("cuda:1#0", B), ("cuda:1#1", B)):
            one = found[name]
            assert (one["device"], one["visible"], one["order"]) == ("cuda:0", uuid, "PCI_BUS_ID")
            assert one["gpus"] == [hexadecimal(uuid)]
        assert found["cuda:0#0"]["cpus"] == [cpus[0]]
        assert found["cuda:1#0"]["cpus"] == [cpus[-1]]
        assert found["cuda:1#0"]["preferred"] == []
        refused = any("NUMA node" in one["msg"] for one in server.messages())
        assert found["cuda:0#0"]["preferred"] == ([] if refused else ["prefer:0"])
        assert (found["cpu#0"]["visible"], found["cpu#0"]["cpus"]) == (None, list(cpus))
        assert json.loads(server.infer("m", 1.0).output("seen")[0])["pid"] in server.workers


def test_auto_is_the_gpu_with_the_most_free_memory(
    two_gpus: GpuMachine, tmp_path: Path, views: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus.change_gpu(A, memory=16 << 30, foreign_memory=9 << 30)  # 7 GiB are free; of the other one 8
    on(two_gpus, monkeypatch)
    devices, keys = ["auto", "cuda:1", "auto", "auto"], {"memory_nbytes": "2GiB"}
    with OperatedServer(config(tmp_path, views, *devices, keys=keys)).until_killed() as server:
        # The fixed one leaves 6 GiB on cuda:1; then 7 and 6, 5 and 6, 5 and 4 GiB are free.
        assert set(seen(views)) == {"cuda:0#0", "cuda:1#0", "cuda:1#1", "cuda:0#1"}
        status = gpuserve("status", "--json", "--server", server.addresses["HTTP"])[1]
        rows = json.loads(status)["models"][0]["instances"]
        assert [one["device"] for one in rows] == ["cuda:0", "cuda:1", "cuda:1", "cuda:0"]

        config(tmp_path, views, *devices, "auto", keys=keys)
        assert gpuserve("reload", "--server", server.addresses["HTTP"])[0] == 0
        status = gpuserve("status", "--json", "--server", server.addresses["HTTP"])[1]
        assert len(json.loads(status)["models"][0]["instances"]) == 5


@pytest.mark.thorough
def test_auto_without_a_gpu_is_the_cpu_unless_arrays_need_one(
    tmp_path: Path, views: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(GpuMachine(tmp_path / "none", []), monkeypatch)
    with OperatedServer(config(tmp_path, views, "auto")).until_killed():
        assert set(seen(views)) == {"cpu#0"}
    code, _, err = gpuserve("check", str(config(tmp_path, views, "auto", keys={"array": "cupy"})))
    assert code == 5
    assert "device 'auto' of a model with CuPy arrays needs a GPU: " in err


@pytest.mark.thorough
def test_a_process_uses_several_gpus_together_and_needs_all_of_them(
    two_gpus: GpuMachine, tmp_path: Path, views: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(two_gpus, monkeypatch)
    file = config(tmp_path, views, ["cuda:1", "cuda:0"], gpu_health_interval_s=0.1)
    with OperatedServer(file).until_ended() as server:
        (one,) = seen(views).values()
        assert (one["device"], one["visible"]) == ("cuda:0", f"{B},{A}")
        assert one["gpus"] == [hexadecimal(B), hexadecimal(A)]
        assert server.infer("m", 1.0).status == 200
        status = gpuserve("status", "--json", "--server", server.addresses["HTTP"])[1]
        (row,) = json.loads(status)["models"][0]["instances"]
        assert (row["name"], row["device"]) == ("cuda:1+cuda:0#0", "cuda:1+cuda:0")
        two_gpus.lose(A)
        wait_until(lambda: server.status("/v2/models/m/ready") == 400, "the instance lacks one GPU")
        assert server.infer("m", 1.0).status == 503
        two_gpus.change_gpu(A, lost=False)
        server.wait_model_ready("m")
        assert server.infer("m", 1.0).status == 200


@pytest.mark.thorough
def test_gpus_of_one_process_must_differ(
    two_gpus: GpuMachine, tmp_path: Path, views: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(two_gpus, monkeypatch)
    code, _, err = gpuserve("check", str(config(tmp_path, views, ["cuda:0", "cuda:0"])))
    assert code == 4
    assert "expected different GPUs for one process, given 'cuda:0+cuda:0'" in err
    code, _, err = gpuserve("check", str(config(tmp_path, views, [])))
    assert code == 4
    assert "expected the name of a device, or a list of names of GPUs, given an empty list" in err


def test_a_gpu_by_name_and_by_uuid(
    gpu_machine: GpuMachine | RealMachine, tmp_path: Path, views: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(gpu_machine, monkeypatch)
    listed = next(one for one in inventory()["gpus"] if one["device"] == "cuda:0")
    file = config(tmp_path, views, "cuda:0", listed["uuid"], listed["uuid"][:-1])
    with OperatedServer(file).until_killed() as server:
        found = seen(views)
        assert set(found) == {"cuda:0#0", "cuda:0#1", "cuda:0#2"}
        for one in found.values():
            (gpu,) = one["gpus"]
            assert one["visible"] == listed["uuid"]
            assert hexadecimal(listed["uuid"]).startswith(gpu)  # cupy ends it at a zero
            assert len(gpu) > 8
            assert set(one["cpus"]) <= os.sched_getaffinity(0)
        assert server.infer("m", 1.0).status == 200
        assert server.infer("m", 1.0).output("seen")


def test_a_replaced_worker_gets_the_same_gpu(
    two_gpus: GpuMachine, tmp_path: Path, views: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(two_gpus, monkeypatch)
    with OperatedServer(config(tmp_path, views, "cuda:1")).until_killed():
        before = seen(views)["cuda:1#0"]
        two_gpus.change_gpu(A, lost=True)  # by number it would be another GPU now
        os.kill(before["pid"], 9)
        wait_until(lambda: seen(views)["cuda:1#0"]["pid"] != before["pid"], "the successor has loaded")
        assert seen(views)["cuda:1#0"]["gpus"] == [hexadecimal(B)]


def test_the_parents_variable_and_mig(
    two_gpus: GpuMachine, tmp_path: Path, views: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two_gpus.change(gpus=(GPU_0, GPU_1, IN_PARTS))
    on(two_gpus, monkeypatch, CUDA_VISIBLE_DEVICES=f"{N.uuid},1,{M.uuid}")
    with OperatedServer(config(tmp_path, views, "cuda:*", B, numa_affinity=False)).until_killed():
        found = seen(views)
        assert {name: one["visible"] for name, one in found.items()} == {
            "cuda:0#0": N.uuid, "cuda:1#0": B, "cuda:2#0": M.uuid, "cuda:1#1": B,
        }  # fmt: skip
        assert found["cuda:2#0"]["gpus"] == [hexadecimal(M.uuid)]
        assert all(one["preferred"] == [] for one in found.values())


def load(server: OperatedServer, **override: Any) -> tuple[int, str]:
    """Ask for the model to be loaded, with a config override where one is given."""
    parameters = {"parameters": {"config": json.dumps(override)}} if override else {}
    with server.client() as client:
        client.connection.request("POST", "/v2/repository/models/m/load", json.dumps(parameters))
        response = client.connection.getresponse()
        return response.status, response.read().decode()


@pytest.mark.thorough
def test_a_model_that_a_client_loads_is_placed_by_another_look(
    stand_in: GpuMachine, tmp_path: Path, views: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(stand_in, monkeypatch)
    with OperatedServer(config(tmp_path, views, "cuda:*", model_control="explicit")).until_killed() as server:
        assert set(seen(views)) == {"cuda:0#0"}
        stand_in.change(gpus=(GPU_1, GPU_0))
        assert load(server) == (200, "")
        assert {name: one["visible"] for name, one in seen(views).items()} == {"cuda:0#0": A, "cuda:1#0": B}
        config(tmp_path, views, "cuda:5", model_control="explicit")
        status, body = load(server)
        assert status == 400
        assert f"this machine has no device 'cuda:5', only cpu, cuda:0 ({A}), cuda:1 ({B})" in body
        assert load(server, instance_group=[{"kind": "KIND_GPU", "count": 1}]) == (200, "")
        assert load(server, instance_group=[{"kind": "KIND_GPU", "count": 2, "gpus": [1]}]) == (200, "")
        assert seen(views)["cuda:1#1"]["visible"] == B
        stand_in.change(nvml_hang_s=3.0)
        assert server.infer("m", 1.0).status == 200


PROGRAM = """
import sys
sys.path[:0] = {paths}
from bound import FLOATS_IN_AND_OUT, UNBATCHED, ask, free_server
from device_view import View
from gpuserve.core.errors import BindError, DeviceError

def made(device):
    view = View(device, {views!r})
    return lambda requests: [{{"OUTPUT_1": request["INPUT_1"]}} for request in requests]

def tell(requests):
    return [{{"OUTPUT_1": request["INPUT_1"]}} for request in requests]

with free_server() as server:
    server.bind("one", made, **FLOATS_IN_AND_OUT, device=["cuda:1", "cuda:0"])
    server.bind("two", [made, made], **FLOATS_IN_AND_OUT, device="GPU-00000000-0000-4000-8000-00000000000b")
    server.run()
    server.bind("all", made, **FLOATS_IN_AND_OUT, device="cuda:*")
    server.bind("thread", tell, **FLOATS_IN_AND_OUT, device="cuda:1", isolation="thread")
    print(ask(server, "one", 1.0), ask(server, "thread", 2.0))
    try:
        server.bind("none", made, **FLOATS_IN_AND_OUT, device="cuda:2")
    except DeviceError as error:
        print(error)
    for device in ("gpu", [], 3, ["cpu", "cpu", "cpu"]):
        try:
            server.bind("none", [made, made], **FLOATS_IN_AND_OUT, device=device)
        except BindError as error:
            print(error)
"""


@pytest.mark.thorough
def test_bind_with_devices(two_gpus: GpuMachine, views: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on(two_gpus, monkeypatch)
    program = PROGRAM.format(paths=[str(MODELS.parent), str(MODELS)], views=str(views))
    done = finished([sys.executable, "-c", program])
    assert done.returncode == 0, done.stderr
    answers, absent, *refused = done.stdout.splitlines()
    assert answers == "[1.0] [2.0]"
    assert (
        absent == f"model 'none': this machine has no device 'cuda:2', only cpu, cuda:0 ({A}), cuda:1 ({B})"
    )
    assert refused == [
        "device: expected 'cpu', 'auto', 'cuda:0', 'cuda:1', …, 'cuda:*' for every GPU, or a UUID "
        "(GPU-… or MIG-…), given 'gpu'",
        "device must be a string or a non-empty sequence of strings, got []",
        "device must be a string or a non-empty sequence of strings, got 3",
        "there are 2 callables and 3 devices: give one device, or one for each callable",
    ]
    assert {one["visible"] for one in seen(views).values()} == {A, B}


# ---- what the command line says ---------------------------------------------------------------


def test_the_list_of_a_real_machine_or_the_stand_in(
    gpu_machine: GpuMachine | RealMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(gpu_machine, monkeypatch)
    facts = inventory()
    assert facts["driver"]
    assert float(facts["cuda"]) >= 11
    gpu = facts["gpus"][0]
    assert gpu["uuid"].startswith("GPU-")
    assert 0 < gpu["memory_free_nbytes"] <= gpu["memory_total_nbytes"]
    assert facts["devices"][:2] == ["cpu", "cuda:0"]
    code, out, err = gpuserve("devices")
    assert (code, err) == (0, "")
    assert out.startswith(f"NVIDIA driver {facts['driver']}, CUDA {facts['cuda']}, cupy")
    assert f"  {gpu['uuid']}\n" in out


@pytest.mark.thorough
def test_the_list_in_full(two_gpus: GpuMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = Gpu(
        A,
        "NVIDIA H200",
        memory=8 << 30,
        foreign_memory=1 << 30,
        numa_node=1,
        cpus=(0, 1, 2, 3, 8),
        compute_mode=3,
    )
    two_gpus.change(gpus=(gpu, Gpu(B, numa_node=None, cpus=(), pci_bus_id="00000000:65:00.0"), IN_PARTS))
    on(two_gpus, monkeypatch, CUDA_VISIBLE_DEVICES=f"0,{M.uuid}")
    code, out, _ = gpuserve("devices")
    assert code == 0
    lines = [line.split("  ") for line in out.splitlines()]
    rows = [[cell.strip() for cell in line if cell] for line in lines[3:8]]
    assert rows == [
        ["cuda:0", "NVIDIA H200", "7.0 of 8.0 GiB", "1", "0-3,8", "exclusive process", A],
        ["-", "NVIDIA Stand-in", "8.0 of 8.0 GiB", "-", "-", "default", B],
        ["MIG mode", "NVIDIA Stand-in", *rows[2][2:6], IN_PARTS.uuid],
        ["cuda:1", "MIG instance", "4.0 of 4.0 GiB", M.uuid],
        ["-", "MIG instance", "4.0 of 4.0 GiB", N.uuid],
    ]
    assert f"CUDA_VISIBLE_DEVICES is '0,{M.uuid}'; it excludes the GPUs without a device name\n" in out
    assert (
        "cuda:0 is in compute mode 'exclusive process': without MPS only one process at a time can use it\n"
        in out
    )
    facts = inventory()
    assert facts["gpus"][0]["cpus"] == [0, 1, 2, 3, 8]
    assert facts["gpus"][2]["mig_instances"][0] == {
        "device": "cuda:1", "uuid": M.uuid, "memory_total_nbytes": M.memory, "memory_free_nbytes": M.memory,
    }  # fmt: skip
    assert (facts["gpus"][1]["device"], facts["gpus"][2]["mig_mode"]) == (None, True)


@pytest.mark.thorough
def test_the_list_with_a_config(
    two_gpus: GpuMachine, tmp_path: Path, views: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(two_gpus, monkeypatch)
    file = str(config(tmp_path, views, "cuda:*", "cpu"))
    code, out, err = gpuserve("devices", file)
    assert (code, err) == (0, "")
    head, *rows = [line.split() for line in out.splitlines()[-4:]]
    assert head == ["Model", "Instance", "Device", "UUID"]
    assert rows == [["m", "cuda:0#0", "cuda:0", A], ["m", "cuda:1#0", "cuda:1", B], ["m", "cpu#0", "cpu"]]
    code, out, _ = gpuserve("devices", file, "--json")
    assert json.loads(out)["instances"][1] == {
        "model": "m", "instance": "cuda:1#0", "device": "cuda:1", "uuid": B,
    }  # fmt: skip
    assert seen(views) == {}  # nothing was started
    code, out, err = gpuserve("devices", str(config(tmp_path, views, "cuda:2")))
    assert code == 5
    assert B in out
    assert "this machine has no device 'cuda:2', only cpu, cuda:0" in err
    assert gpuserve("devices", str(tmp_path / "none.yaml"))[0] == 4


NO_LIBRARY: dict[str, Any] = {"nvml": False}
NO_DRIVER: dict[str, Any] = {"driver_version": None}
#: NVML_ERROR_LIB_RM_VERSION_MISMATCH: the driver was updated and not yet loaded again.
MISMATCH: dict[str, Any] = {"failures": {"nvmlInit": 18}}
HANGS: dict[str, Any] = {"nvml_hang_s": 60.0}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("machine", "device", "text"),
    [
        (NO_LIBRARY, "cuda:0", "this machine has no device 'cuda:0', only cpu: no NVIDIA driver was found"),
        (NO_DRIVER, "cuda:*", "this machine has no device 'cuda:*', only cpu: no NVIDIA driver was found"),
        (
            MISMATCH,
            "cuda:0",
            "only cpu: the NVIDIA driver was found, but no GPU: NVML failed: RM has detected an NVML/RM",
        ),
        ({}, "cuda:7", f"this machine has no device 'cuda:7', only cpu, cuda:0 ({A})"),
        ({}, "GPU-1", f"this machine has no device 'GPU-1', only cpu, cuda:0 ({A})"),
        ({"gpus": ()}, "cuda:0", "the NVIDIA driver 580.65.06 was found, but no GPU"),
        (
            {"gpus": (IN_PARTS,)},
            IN_PARTS.uuid,
            f"{IN_PARTS.uuid} is in MIG mode and cannot be used as a whole: name one of its instances, "
            f"{M.uuid}, {N.uuid}",
        ),
        ({"gpus": (Gpu(A, compute_mode=2),)}, "cuda:0", f"cuda:0 ({A}) is in compute mode 'prohibited'"),
        ({"gpus": (Gpu(A, lost=True),)}, "cuda:0", "but no GPU: GPU 0 does not answer (GPU is lost)"),
    ],
)
def test_check_and_serve_say_what_was_found_and_what_is_missing(
    machine: dict[str, Any],
    device: str,
    text: str,
    stand_in: GpuMachine,
    tmp_path: Path,
    views: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stand_in.change(**machine)
    on(stand_in, monkeypatch)
    file = str(config(tmp_path, views, device))
    code, _, err = gpuserve("check", file)
    assert (code, text in err) == (5, True), err
    assert f"{file}:1:" in err
    assert len(err.splitlines()) == 3  # a sentence, the line, the carets
    if device == "cuda:0":
        code, _, err = gpuserve("serve", file, *FREE_PORTS)
        assert (code, text in err) == (5, True), err
        assert gpuserve("devices")[0] == 0


@pytest.mark.thorough
def test_a_driver_that_hangs_ends_the_start(
    stand_in: GpuMachine, tmp_path: Path, views: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.change(**HANGS)
    on(stand_in, monkeypatch)
    code, _, err = gpuserve("serve", str(config(tmp_path, views, "cuda:0")), *FREE_PORTS)
    assert code == 5
    assert "the NVIDIA driver did not answer within 5 s, so it cannot be told which GPUs there are" in err


@pytest.mark.thorough
def test_a_library_that_is_missing_is_told_before_the_start(
    stand_in: GpuMachine, tmp_path: Path, views: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on(stand_in, monkeypatch)
    only_nvml = tmp_path / "installed"
    only_nvml.mkdir()
    for name in ("pynvml", "cuda_simulation"):
        (only_nvml / name).symlink_to(Path(stand_in.environ["PYTHONPATH"].split(os.pathsep)[0]) / name)
    monkeypatch.setenv("PYTHONPATH", str(only_nvml))
    code, _, err = gpuserve("check", str(config(tmp_path, views, "cuda:0", keys={"array": "cupy"})))
    assert code == 5
    text = (
        "model 'm': input 'x' on a GPU needs cupy, which is not installed: pip install 'gpuserve[cuda12]' or"
    )
    assert text in err
    inputs = [{"name": "x", "dtype": "float32", "shape": [1], "memory": "gpu"}]
    file = config(tmp_path, views, "cuda:0", keys={"inputs": inputs})
    code, _, err = gpuserve("check", str(file))
    assert (code, text in err) == (5, True), err
    column = 1 + file.read_text().index('"gpu"')
    assert err.startswith(f"{file}:1:{column}: ")
    code, _, err = gpuserve("check", str(config(tmp_path, views, "cpu", keys={"array": "torch"})))
    assert (code, "array 'torch' needs torch" in err) == ((0, False) if find_spec("torch") else (5, True)), (
        err
    )
    assert "cupy is not installed, so inputs cannot be passed on a GPU" in gpuserve("devices")[1]
