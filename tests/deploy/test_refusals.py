"""What no cluster could run is refused, with the key that says it and where it stands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exporting import IMAGE, OPTIONS, export, loaded, written

from gpuserve.config.messages import ConfigProblems
from gpuserve.export.quantities import GIB
from gpuserve.export.rendering import grafana_text, kubernetes_stream


def problem(
    folder: Path, *models: dict[str, Any], options: dict[str, Any] | None = None, **server: Any
) -> str:
    """The one problem, without the lines of the file below it."""
    with pytest.raises(ConfigProblems) as error:
        kubernetes_stream(loaded(folder, *models, **server), replace(OPTIONS, **(options or {})))
    (found,) = error.value.problems
    return str(found).split("\n")[0].removeprefix(f"{folder}/")


def on(*devices: str, **resources: int) -> dict[str, Any]:
    return {"instances": [{"device": one, "resources": resources} for one in devices]}


@pytest.mark.parametrize(
    ("image", "said"),
    [
        ("", "--image: missing: a pod runs an image"),
        ("gpuserve", "--image: expected one with a tag or a digest"),
        ("registry.example/gpuserve", "--image: expected one with a tag or a digest"),
        ("registry.example/gpu serve:1", "--image: expected one with a tag or a digest"),
        ("registry.example/gpuserve:latest", "--image: the tag 'latest' is another image tomorrow"),
        ("registry.example:5000/gpuserve", "--image: expected one with a tag or a digest"),
    ],
)
def test_an_image_that_says_no_version(tmp_path: Path, image: str, said: str) -> None:
    assert problem(tmp_path, options={"image": image}).startswith(said)


@pytest.mark.parametrize("image", ["gpuserve:1", "registry.example:5000/a/b:1.2-x", f"a/b@sha256:{'0' * 64}"])
def test_an_image_that_says_one(tmp_path: Path, image: str) -> None:
    assert image in kubernetes_stream(loaded(tmp_path), replace(OPTIONS, image=image))


@pytest.mark.parametrize("name", ["Double", "my_model", "model.v1", "9lives", "m" * 46])
def test_a_model_whose_name_is_no_dns_label(tmp_path: Path, name: str) -> None:
    said = problem(tmp_path, {"name": name})
    assert "models[0].name: the objects of the cluster would be called" in said
    assert said.startswith("config.yaml:3:")
    assert "give them a name with --name" in said
    assert kubernetes_stream(loaded(tmp_path, {"name": name}), replace(OPTIONS, name="mine"))


def test_two_models_need_no_name_of_theirs(tmp_path: Path) -> None:
    text = kubernetes_stream(loaded(tmp_path, {"name": "Model_A"}, {"name": "Model_B"}), OPTIONS)
    assert "name: gpuserve-grpc" in text


@pytest.mark.parametrize("name", ["model-", "_model", "m" * 64])
def test_a_model_whose_name_is_no_label_value(tmp_path: Path, name: str) -> None:
    assert "cannot be the value of a label" in problem(tmp_path, {"name": name}, options={"name": "mine"})


def test_a_name_that_is_no_dns_label(tmp_path: Path) -> None:
    said = problem(tmp_path, options={"name": "My.Name"})
    assert said.startswith("--name: 'My.Name' is no DNS label")


def test_a_namespace_that_is_none(tmp_path: Path) -> None:
    assert (
        problem(tmp_path, options={"namespace": "Models"})
        == "--namespace: 'Models' is no name of a namespace"
    )


@pytest.mark.parametrize(
    ("device", "per_node", "said"),
    [
        ("cuda:*", None, "how many GPUs 'cuda:*' stands for depends on the node: give --gpus-per-node"),
        ("cuda:4", 4, "'cuda:4' needs 5 GPUs, and a node has 4 (--gpus-per-node)"),
        ("GPU-8f2a", None, "'GPU-8f2a' is one GPU of one machine, and a pod runs on any: write cuda:0"),
        ("MIG-8f2a", None, "'MIG-8f2a' is one GPU of one machine"),
    ],
)
def test_a_device_that_pods_do_not_have(tmp_path: Path, device: str, per_node: int | None, said: str) -> None:
    found = problem(tmp_path, on(device), options={"gpus_per_node": per_node})
    assert f"models[0].instances[0].device: {said}" in found
    assert found.startswith("config.yaml:")


def test_a_config_larger_than_a_node(tmp_path: Path) -> None:
    free = {"inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}]}
    found = problem(tmp_path, free, options={"node_memory_nbytes": 4 * GIB}, max_arena_nbytes=8 * GIB)
    assert "and a node has 4 GiB (--node-memory): 8.2 GiB of it is requests for double" in found
    assert found.startswith("config.yaml:2:21")  # where max_arena_nbytes stands


def test_two_models_beyond_the_memory_of_a_gpu(tmp_path: Path) -> None:
    models = [on("cuda:0", gpu_memory_nbytes=50 * GIB) | {"name": name} for name in ("first", "second")]
    found = problem(tmp_path, *models, options={"gpu_memory_nbytes": 80 * GIB})
    assert "cuda:0 would hold 100 GiB (first 50 GiB, second 50 GiB), and a GPU has 80 GiB" in found
    apart = [on(f"cuda:{i}", gpu_memory_nbytes=50 * GIB) | {"name": f"model{i}"} for i in range(2)]
    assert kubernetes_stream(loaded(tmp_path, *apart), replace(OPTIONS, gpu_memory_nbytes=80 * GIB))


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"grpc_port": 0}, "server.grpc_port: 0 picks a free port, and a Service needs a fixed one"),
        ({"host": "127.0.0.1"}, "server.host: '127.0.0.1' is not reached from outside a pod"),
        ({"metrics_port": None}, "server.metrics_port: null switches off the metrics page"),
        ({"http_port": None, "grpc_port": None}, "server.http_port: neither HTTP nor gRPC is served"),
        (
            {"restricted_endpoints": ["health"], "access_token": "t" * 32},
            "server.restricted_endpoints: the node asks for health without a token",
        ),
        (
            {"trace": {"level": ["TIMESTAMPS"], "file": "/var/log/trace.json"}},
            "server.trace.file: '/var/log/trace.json' cannot be written in a pod",
        ),
    ],
)
def test_a_server_that_nobody_could_reach(tmp_path: Path, server: dict[str, Any], said: str) -> None:
    found = problem(tmp_path, **server)
    assert said in found
    assert found.startswith("config.yaml:")


def test_every_port_with_tls_needs_one_for_health(tmp_path: Path) -> None:
    assert "give a server.health_port" in problem(tmp_path, options={"tls_secret": "certificate"})
    assert kubernetes_stream(loaded(tmp_path, health_port=8003), replace(OPTIONS, tls_secret="certificate"))


def test_fewer_pods_at_most_than_at_least(tmp_path: Path) -> None:
    found = problem(tmp_path, options={"replicas": 3, "max_replicas": 2})
    assert found == "--max-replicas: expected at least --replicas 3, given 2"


def test_a_dashboard_needs_the_metrics_page(tmp_path: Path) -> None:
    with pytest.raises(ConfigProblems, match=r"server\.metrics_port"):
        grafana_text(loaded(tmp_path, metrics_port=None), OPTIONS)


def test_the_command_shows_every_problem_and_writes_nothing(tmp_path: Path) -> None:
    config = written(tmp_path, on("cuda:*"), grpc_port=0)
    done = export("kubernetes", config, "--out", tmp_path / "out")
    assert done.returncode == 4
    assert [line.split(": ")[1] for line in done.stderr.splitlines() if not line.startswith("  ")] == [
        "missing",
        "server.grpc_port",
        "models[0].instances[0].device",
    ]
    assert not (tmp_path / "out").exists()


def test_a_wrong_command_line_is_told_apart(tmp_path: Path) -> None:
    assert export("kubernetes", written(tmp_path)).returncode == 2  # no image: the config is right
    done = export("kubernetes", written(tmp_path), "--image", IMAGE, "--node-memory", "many")
    assert done.returncode == 2
    assert "expected an amount of memory" in done.stderr


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    done = export("kubernetes", written(tmp_path), "--image", IMAGE, "--out", tmp_path / "taken")
    assert done.returncode == 2
    assert "cannot be written" in done.stderr
