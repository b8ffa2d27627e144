"""What no cluster could run is refused, with the key that says it and where it stands."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exporting import IMAGE, OPTIONS, export, loaded, written

from gpuserve.cli.export.pod_sizing import GIB
from gpuserve.cli.export.rendering import grafana_text, kubernetes_stream
from gpuserve.config.problems import ConfigProblems


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
        ("registry.example/gpuserve:latest", "--image: the tag 'latest' changes its image"),
        ("registry.example:5000/gpuserve", "--image: expected one with a tag or a digest"),
        ("Gpuserve/models:1", "--image: expected one with a tag or a digest"),
        ("https://registry.example/gpuserve:1", "--image: expected one with a tag or a digest"),
        ("registry.example//gpuserve:1", "--image: expected one with a tag or a digest"),
        ("gpuserve:1:2", "--image: expected one with a tag or a digest"),
        (f"gpuserve@sha256:{'0' * 63}", "--image: expected one with a tag or a digest"),
    ],
)
def test_an_image_that_says_no_version(tmp_path: Path, image: str, said: str) -> None:
    assert problem(tmp_path, options={"image": image}).startswith(said)


@pytest.mark.parametrize(
    "image",
    [
        "gpuserve:1",
        "registry.example:5000/a/b:1.2-x",
        "registry:5000/a:1",
        "localhost/a_b/c--d:1",
        f"a/b@sha256:{'0' * 64}",
        f"a/b:latest@sha256:{'0' * 64}",
    ],
)
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


def test_what_is_shown_of_a_long_image_is_short(tmp_path: Path) -> None:
    found = problem(tmp_path, options={"image": f"registry.example/{'m' * 5000}:1"})
    assert found.startswith("--image: expected one with a tag or a digest")
    assert len(found) < 300


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"gpu_resource": "cpu"}, "--gpu-resource: expected the resource name of a device plugin"),
        ({"gpu_resource": "nvidia.com/"}, "--gpu-resource: expected the resource name of a device plugin"),
        ({"gpu_resource": "nvidia.com/a b"}, "--gpu-resource: expected the resource name"),
        ({"gpu_product": "H100 80GB"}, "--gpu-product: expected the value of a node's label"),
        ({"runtime_class": "Nvidia_"}, "--runtime-class: 'Nvidia_' is not a valid name of a RuntimeClass"),
        ({"gpu_sharing": "mig"}, "--gpu-sharing: expected mps or time-slicing, given 'mig'"),
        ({"gpu_sharing": "mps"}, "--gpu-sharing: a pod would get 8 shares, which may be of one GPU"),
        ({"tls_secret": "My_Secret"}, "--tls-secret: 'My_Secret' is not a valid name of a Secret"),
        ({"prometheus": ""}, "--prometheus: expected an address such as http://"),
        ({"prometheus": "prometheus:9090"}, "--prometheus: expected an address such as http://"),
        ({"prometheus": "http://prometheus:port"}, "--prometheus: expected an address such as http://"),
        ({"replicas": 10**20}, "--replicas: expected at most 2147483647, given 1000"),
        ({"replicas": 10**9}, "--max-replicas: expected at most 2147483647, given 4000000000"),
        ({"gpus_per_node": 10**12}, "--gpus-per-node: expected at most 1024, given 1000000000000"),
    ],
)
def test_flags_that_no_cluster_takes(tmp_path: Path, options: dict[str, Any], said: str) -> None:
    found = problem(tmp_path, on("cuda:*"), options={"gpus_per_node": 8} | options, health_port=8003)
    assert found.startswith(said)


@pytest.mark.parametrize("host", ["a b", "host:8000", "http://host", "/host", "-host", "x" * 256])
def test_a_host_that_is_none(tmp_path: Path, host: str) -> None:
    done = export("envoy", written(tmp_path), "--host", host)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("--host: expected a name or an address without a port")


@pytest.mark.parametrize("host", ["models.example", "my_pods.", "127.0.0.1", "::1"])
def test_a_host_that_is_one(tmp_path: Path, host: str) -> None:
    assert f"address: {host}" in export("envoy", written(tmp_path), "--host", host).stdout.replace('"', "")


def test_a_namespace_that_is_none(tmp_path: Path) -> None:
    assert (
        problem(tmp_path, options={"namespace": "Models"})
        == "--namespace: 'Models' is not a valid name of a namespace"
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
    assert " server.max_arena_nbytes: a pod may take" in found


def test_a_config_with_more_cores_than_a_node(tmp_path: Path) -> None:
    model = {"instances": [{"device": "cpu"}, {"device": "cpu", "count": 4, "resources": {"cpus": 8}}]}
    found = problem(tmp_path, model, options={"node_cpus": 33})
    assert "models[0].instances[1].resources.cpus: a pod takes 34 cores, and a node has 33" in found
    assert "(--node-cpus): 4 x 8 of them belong to these instances" in found
    assert kubernetes_stream(loaded(tmp_path, model), replace(OPTIONS, node_cpus=34))


def test_two_models_beyond_the_memory_of_a_gpu(tmp_path: Path) -> None:
    models = [on("cuda:0", gpu_memory_nbytes=50 * GIB) | {"name": name} for name in ("first", "second")]
    found = problem(tmp_path, *models, options={"gpu_memory_nbytes": 80 * GIB})
    assert "cuda:0 would hold 100 GiB (first 50 GiB, second 50 GiB), and a GPU has 80 GiB" in found
    assert " models[1].instances[0].resources.gpu_memory_nbytes: " in found
    apart = [on(f"cuda:{i}", gpu_memory_nbytes=50 * GIB) | {"name": f"model{i}"} for i in range(2)]
    assert kubernetes_stream(loaded(tmp_path, *apart), replace(OPTIONS, gpu_memory_nbytes=80 * GIB))


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"grpc_port": 0}, "server.grpc_port: 0 picks a free port, and a Service needs a fixed one"),
        ({"host": "127.0.0.1"}, "server.host: '127.0.0.1' cannot be reached from outside a pod"),
        ({"host": "10.0.0.5"}, "server.host: '10.0.0.5' cannot be reached from outside a pod"),
        ({"host": "gpu.example"}, "server.host: 'gpu.example' cannot be reached from outside a pod"),
        ({"drain_timeout_s": 1e9}, "server.drain_timeout_s: expected at most 500000000 s"),
        ({"lame_duck_s": 1e12}, "server.lame_duck_s: expected at most 500000000 s"),
        ({"load_timeout_s": 1e9}, "server.load_timeout_s: expected at most 500000000 s"),
        (
            {"trace": {"level": ["TIMESTAMPS"], "file": "/tmp/../var/trace.json"}},
            "server.trace.file: '/tmp/../var/trace.json' cannot be written in a pod",
        ),
        ({"metrics_port": None}, "server.metrics_port: null switches off the metrics page"),
        ({"http_port": None, "grpc_port": None}, "server.http_port: neither HTTP nor gRPC is served"),
        (
            {"restricted_endpoints": ["health"], "access_token": "t" * 32},
            "server.restricted_endpoints: the node checks health without a token",
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
    assert "set server.health_port" in problem(tmp_path, options={"tls_secret": "certificate"})
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
