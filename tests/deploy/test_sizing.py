"""The numbers of a pod follow from the config, and say so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exporting import OPTIONS, exported, loaded
from manifests import only

from gpuserve.cli.export import pod_sizing
from gpuserve.cli.export.export_options import ExportOptions
from gpuserve.cli.export.pod_sizing import (
    GIB,
    MIB,
    STOP_MARGIN_S,
    PodSizes,
    parse_nbytes,
    quantity,
    readable_size,
)
from gpuserve.supervisor.supervisor import FRONT_QUIT_TIMEOUT_S
from gpuserve.supervisor.workers.worker_group import STOP_TIMEOUT_S


def sizes(folder: Path, *models: dict[str, Any], options: ExportOptions = OPTIONS, **server: Any) -> PodSizes:
    return pod_sizing.compute_sizes(loaded(folder, *models, **server), options)


def test_one_core_for_the_front_and_those_of_the_instances(tmp_path: Path) -> None:
    instances = [{"device": "cpu", "count": 3, "resources": {"cpus": 2}}, {"device": "cpu"}]
    found = sizes(tmp_path, {"instances": instances})
    assert found.cpus.value == 1 + 3 * 2 + 1
    assert found.threads.value == "2"


@pytest.mark.parametrize(
    ("ingress", "cpus", "processes"), [(1, 13, 0), (2, 15, 3), ("auto", 17, 5)], ids=["none", "two", "auto"]
)
def test_ingress_processes_have_cores_and_memory(
    tmp_path: Path, ingress: int | str, cpus: int, processes: int
) -> None:
    """Those that auto stands for are of the pod's cores, wherever the manifests are written."""
    instances = [{"device": "cpu", "count": 3, "resources": {"cpus": 4}}]
    found = sizes(tmp_path, {"instances": instances}, ingress_processes=ingress)
    assert found.cpus.value == cpus
    shares = [one.nbytes for one in found.parts if "ingress" in one.name]
    assert sum(shares) == processes * pod_sizing.INGRESS_NBYTES


@pytest.mark.parametrize(
    ("devices", "per_node", "gpus"),
    [
        (["cpu"], None, 0),
        (["cuda:0"], None, 1),
        (["cuda:0", "cuda:3"], None, 4),
        (["cuda:*"], 8, 8),
        (["cuda:1", "cuda:*"], 2, 2),
        (["cuda:0"], 8, 1),
    ],
)
def test_gpus_are_counted_by_the_highest_number(
    tmp_path: Path, devices: list[str], per_node: int | None, gpus: int
) -> None:
    options = replace(OPTIONS, gpus_per_node=per_node)
    found = sizes(tmp_path, {"instances": [{"device": one} for one in devices]}, options=options)
    assert found.gpus.value == gpus


def test_a_queue_of_fixed_shapes_is_smaller_than_the_arena(tmp_path: Path) -> None:
    """4096 requests of a full batch: 8 rows of 64 bytes each are 2 MiB, far from 8 GiB."""
    found = {part.path: part.nbytes for part in sizes(tmp_path).parts}
    assert found["models", 0, "queue"] == 16 * MIB
    assert ("server", "max_arena_nbytes") not in found


def test_free_shapes_may_take_the_whole_arena(tmp_path: Path) -> None:
    free = {"inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}]}
    found = {part.path: part.nbytes for part in sizes(tmp_path, free, max_arena_nbytes=GIB).parts}
    assert found["server", "max_arena_nbytes"] == GIB + 4096 * pod_sizing.HEAP_REQUEST_NBYTES


def test_strings_have_a_free_size(tmp_path: Path) -> None:
    strings = {"inputs": [{"name": "x", "dtype": "bytes", "shape": [1]}]}
    assert ("server", "max_arena_nbytes") in {part.path for part in sizes(tmp_path, strings).parts}


def test_every_model_has_an_arena_of_its_own(tmp_path: Path) -> None:
    free = {"inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}]}
    one = sizes(tmp_path, free, max_arena_nbytes=GIB).memory_nbytes
    two = sizes(tmp_path, free, {**free, "name": "second"}, max_arena_nbytes=GIB).memory_nbytes
    assert two - one > GIB


def test_memory_is_declared_or_assumed(tmp_path: Path) -> None:
    declared = {"instances": [{"device": "cpu", "count": 2, "resources": {"memory_nbytes": 3 * GIB}}]}
    path = ("models", 0, "instances", 0, "resources", "memory_nbytes")
    assert {part.path: part.nbytes for part in sizes(tmp_path, declared).parts}[path] == 6 * GIB
    assumed = {part.path: part for part in sizes(tmp_path, {"instances": [{"device": "cuda:0"}]}).parts}[path]
    assert assumed.nbytes == pod_sizing.GPU_PROCESS_NBYTES
    assert "assumed" in assumed.name


def test_workers_on_demand_take_no_more_than_their_budget(tmp_path: Path) -> None:
    large = {"instances": [{"device": "cpu", "resources": {"memory_nbytes": 3 * GIB}}]}
    models = [{**large, "name": name, "on_demand": True} for name in "abc"]
    path = ("server", "memory", "host")
    found = {part.path: part.nbytes for part in sizes(tmp_path, *models, memory={"host": "4GiB"}).parts}
    assert found[path] == 4 * GIB
    assert not any(one[-1] == "memory_nbytes" for one in found)
    assert path not in {part.path for part in sizes(tmp_path, *models, memory={"host": "10GiB"}).parts}
    always = {**large, "name": "d"}
    assert path not in {part.path for part in sizes(tmp_path, always, memory={"host": "1GiB"}).parts}


def test_the_parts_add_up(tmp_path: Path) -> None:
    found = sizes(tmp_path, response_cache_nbytes=GIB)
    assert 0 <= found.memory_nbytes - sum(part.nbytes for part in found.parts) < 64 * MIB
    assert parse_nbytes(found.memory.value) == found.memory_nbytes
    assert all(readable_size(part.nbytes) in found.memory.why for part in found.parts)


@pytest.mark.parametrize(
    ("server", "pre_stop", "grace"),
    [
        ({"drain_timeout_s": 45}, 8, 8 + 2 + 45 + STOP_MARGIN_S),
        ({"drain_timeout_s": 45, "lame_duck_s": None}, 8, 8 + 2 + 45 + STOP_MARGIN_S),
        ({"drain_timeout_s": 0.5, "lame_duck_s": 0}, 10, 10 + 1 + STOP_MARGIN_S),
        ({"drain_timeout_s": 30, "lame_duck_s": 4}, 6, 6 + 4 + 30 + STOP_MARGIN_S),
        ({"drain_timeout_s": 30, "lame_duck_s": 15}, 0, 15 + 30 + STOP_MARGIN_S),
    ],
)
def test_the_grace_holds_all_that_happens_in_it(
    tmp_path: Path, server: dict[str, float], pre_stop: int, grace: int
) -> None:
    found = sizes(tmp_path, **server)
    assert (found.pre_stop_s.value, found.grace_s.value) == (pre_stop, grace)


def test_a_lame_duck_that_is_long_enough_needs_no_pre_stop(tmp_path: Path) -> None:
    pod = only(exported(tmp_path, lame_duck_s=15), "Deployment")["spec"]["template"]["spec"]
    assert "lifecycle" not in pod["containers"][0]


def test_the_margin_holds_the_end_of_every_process() -> None:
    assert STOP_MARGIN_S > FRONT_QUIT_TIMEOUT_S + STOP_TIMEOUT_S


def test_the_startup_probe_waits_as_long_as_a_load_may_take(tmp_path: Path) -> None:
    found = sizes(tmp_path, load_timeout_s=100)
    assert found.startup_failures.value * pod_sizing.STARTUP_PERIOD_S >= 100 + pod_sizing.PROCESS_START_S
    assert found.progress_s.value > 100 + pod_sizing.PROCESS_START_S


@pytest.mark.parametrize(
    ("text", "nbytes"), [("64Gi", 64 * GIB), ("1.5Gi", 1536 * MIB), ("80G", 80 * 10**9), ("512", 512)]
)
def test_amounts_of_memory(text: str, nbytes: int) -> None:
    assert parse_nbytes(text) == nbytes
    assert parse_nbytes(quantity(nbytes)) == nbytes


@pytest.mark.parametrize("text", ["", "0", "-1Gi", "64 Gib", "64gi", "1e3", "many"])
def test_what_is_no_amount_of_memory(text: str) -> None:
    with pytest.raises(ValueError, match="expected an amount of memory"):
        parse_nbytes(text)


def test_ranks_are_processes_on_the_gpus_of_a_list(tmp_path: Path) -> None:
    instances = [{"device": ["cuda:0", "cuda:1"], "ranks": 2, "count": 2}, {"ranks": 3}]
    found = sizes(tmp_path, {"instances": instances})
    assert found.gpus.value == 2
    assert found.cpus.value == sizes(tmp_path, {"instances": [{"count": 7}]}).cpus.value
    held = sum(part.nbytes for part in found.parts if "resources" in part.path)
    assert held == 4 * pod_sizing.GPU_PROCESS_NBYTES + 3 * pod_sizing.CPU_PROCESS_NBYTES
