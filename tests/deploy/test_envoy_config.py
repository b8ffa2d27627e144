"""What ``gpuserve export envoy`` writes: Envoy itself takes it, and it fits the pods of the same config."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from exporting import OPTIONS, export, loaded, written
from manifests import documents
from tls import Authority

from gpuserve.cli.export import envoy_proxy

ENVOY = str(Path(sys.executable).with_name("envoy"))
TOKEN = "t" * 32
FREE = {"inputs": [{"name": "x", "dtype": "float32", "shape": [-1]}]}
LARGE = {"inputs": [{"name": "x", "dtype": "float32", "shape": [3, 640, 640]}]}
HUGE = {"inputs": [{"name": "x", "dtype": "float32", "shape": [1 << 24]}]}
#: By name: keys of ``server``, options of the export.
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}),
    "only gRPC": ({"http_port": None}, {}),
    "only HTTP": ({"grpc_port": None}, {}),
    "health port": ({"health_port": 8003}, {}),
    "TLS": ({}, {"tls_secret": "certificate"}),
    "TLS, health port": ({"health_port": 8003}, {"tls_secret": "certificate"}),
    "TLS for HTTP": ({"tls_ports": ["http"]}, {"tls_secret": "certificate"}),
    "clients' certificates": (
        {
            "tls_client_ca": "its path",
            "health_port": 8003,
        },
        {},
    ),
    "restricted health": ({"restricted_endpoints": ["health"], "access_token": TOKEN}, {}),
    "a rule for health": (
        {"access_rules": [{"groups": ["trace"], "token": "other"}, {"groups": ["health"], "token": TOKEN}]},
        {},
    ),
    "IPv6": ({"host": "::"}, {}),
    "grpcio": ({"transport": "grpcio"}, {}),
    "names": ({}, {"name": "mine", "namespace": "models"}),
}  # fmt: skip


def exported_files(
    folder: Path, *models: dict[str, Any], variant: str = "plain", host: str = ""
) -> dict[str, str]:
    server, options = VARIANTS[variant]
    if "tls_client_ca" in server:
        server = server | certificate(folder)
    return envoy_proxy.envoy_files(loaded(folder, *models, **server), replace(OPTIONS, **options), host)


def certificate(folder: Path) -> dict[str, str]:
    """Files that the config can name."""
    authority = Authority(folder / "authority")
    issued = authority.issue("pods")
    return {
        "tls_certfile": str(issued.certificate),
        "tls_keyfile": str(issued.key),
        "tls_client_ca": str(authority.certificate),
    }


def parsed(files: dict[str, str]) -> dict[str, Any]:
    (document,) = documents(files[envoy_proxy.BOOTSTRAP_FILE])
    return document


def clusters(files: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Those of the pods."""
    named = {one["name"]: one for one in parsed(files)["static_resources"]["clusters"]}
    return {name: one for name, one in named.items() if name != "admin"}


def validated(folder: Path, files: dict[str, str]) -> str:
    """What Envoy says about it; it takes it."""
    for name, text in files.items():
        (folder / name).write_text(text.replace(envoy_proxy.ENVOY_FOLDER, str(folder)))
    command = [ENVOY, "--mode", "validate", "-l", "warning", "-c", str(folder / envoy_proxy.BOOTSTRAP_FILE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("variant", VARIANTS)
def test_envoy_takes_it_and_nothing_of_it_is_deprecated(tmp_path: Path, variant: str) -> None:
    assert "eprecated" not in validated(tmp_path, exported_files(tmp_path, variant=variant))


@pytest.mark.parametrize("variant", ["plain", "only gRPC", "only HTTP"])
def test_there_is_a_listener_and_a_cluster_for_each_port(tmp_path: Path, variant: str) -> None:
    made = exported_files(tmp_path, variant=variant)
    resources = parsed(made)["static_resources"]
    ports = {
        one["name"]: one["address"]["socket_address"]["port_value"]
        for one in resources["listeners"]
        if one["name"] != "status"
    }
    expected = {"http": 8000, "grpc": 8001}
    assert ports == {name: expected[name] for name in clusters(made)}
    assert ports.keys() == {"plain": {"http", "grpc"}, "only gRPC": {"grpc"}, "only HTTP": {"http"}}[variant]
    for name, one in clusters(made).items():
        (endpoint,) = one["load_assignment"]["endpoints"][0]["lb_endpoints"]
        at = endpoint["endpoint"]["address"]["socket_address"]
        service = "double-metrics" if variant == "only HTTP" else "double-grpc"
        assert at == {"address": service, "port_value": expected[name]}


def test_pods_are_found_by_their_headless_service_or_by_a_name(tmp_path: Path) -> None:
    for files, host in (
        (exported_files(tmp_path, variant="names"), "mine-grpc.models"),
        (exported_files(tmp_path, host="models.example"), "models.example"),
    ):
        for one in clusters(files).values():
            (endpoint,) = one["load_assignment"]["endpoints"][0]["lb_endpoints"]
            assert endpoint["endpoint"]["address"]["socket_address"]["address"] == host


@pytest.mark.parametrize(
    ("variant", "port", "token"),
    [
        ("plain", None, None),
        ("health port", 8003, None),
        ("TLS", None, None),
        ("TLS, health port", 8003, None),
        ("clients' certificates", 8003, None),
        ("restricted health", None, f"Bearer {TOKEN}"),
        ("a rule for health", None, f"Bearer {TOKEN}"),
    ],
)
def test_health_is_asked_where_it_is_answered(
    tmp_path: Path, variant: str, port: int | None, token: str | None
) -> None:
    for one in clusters(exported_files(tmp_path, variant=variant)).values():
        (check,) = one["health_checks"]
        (endpoint,) = one["load_assignment"]["endpoints"][0]["lb_endpoints"]
        asked = endpoint["endpoint"].get("health_check_config", {})
        assert asked.get("port_value") == port
        assert check["grpc_health_check"]["service_name"] == "readiness"
        shown = [entry["header"]["value"] for entry in check["grpc_health_check"].get("initial_metadata", ())]
        assert shown == ([] if token is None else [token])


def test_a_port_for_health_is_asked_without_tls(tmp_path: Path) -> None:
    for one in clusters(exported_files(tmp_path, variant="TLS, health port")).values():
        criteria = one["health_checks"][0]["transport_socket_match_criteria"]
        sockets = {match["name"]: match for match in one["transport_socket_matches"]}
        assert sockets["health"]["match"] == criteria
        assert sockets["health"]["transport_socket"]["name"] == "envoy.transport_sockets.raw_buffer"
        assert sockets["requests"]["match"] == {}
        assert sockets["requests"]["transport_socket"]["name"] == "envoy.transport_sockets.tls"


def test_only_ports_that_speak_tls_have_it_on_both_sides(tmp_path: Path) -> None:
    made = exported_files(tmp_path, variant="TLS for HTTP")
    listeners = {one["name"]: one for one in parsed(made)["static_resources"]["listeners"]}
    speaks = {name: "transport_socket" in one["filter_chains"][0] for name, one in listeners.items()}
    assert speaks == {"http": True, "grpc": False, "status": False}
    assert {name: "transport_socket" in one for name, one in clusters(made).items()} == {
        "http": True,
        "grpc": False,
    }


def test_certificates_of_clients_are_asked_for_and_shown(tmp_path: Path) -> None:
    made = exported_files(tmp_path, variant="clients' certificates")
    text = made[envoy_proxy.BOOTSTRAP_FILE]
    assert len(re.findall("require_client_certificate: true", text)) == 2
    assert len(re.findall("tls_certificate_sds_secret_configs", text)) == 4  # two listeners, two clusters
    (secret,) = documents(made["authority.yaml"])
    authority = secret["resources"][0]["validation_context"]
    assert authority["trusted_ca"] == {"filename": "/etc/gpuserve-tls/ca.crt"}
    assert authority["watched_directory"] == {"path": "/etc/gpuserve-tls"}


@pytest.mark.parametrize(
    ("model", "mebibytes"),
    [({}, 1), (FREE, 16), (LARGE | {"max_batch_size": 1}, 5), (LARGE, 38), (HUGE, 64)],
)
def test_requests_up_to_the_largest_of_a_model_are_repeated(
    tmp_path: Path, model: dict[str, Any], mebibytes: int
) -> None:
    text = exported_files(tmp_path, model)[envoy_proxy.BOOTSTRAP_FILE]
    assert set(re.findall(r"request_body_buffer_limit: (\d+)", text)) == {str(mebibytes << 20)}


def test_inference_is_repeated_and_control_is_not(tmp_path: Path) -> None:
    (listener, *_) = parsed(exported_files(tmp_path))["static_resources"]["listeners"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    (host,) = manager["route_config"]["virtual_hosts"]
    *repeated, rest = [one for one in host["routes"] if "route" in one]
    assert "reset" in host["retry_policy"]["retry_on"].split(",")
    assert all("retry_policy" not in one["route"] for one in repeated)
    assert set(rest["route"]["retry_policy"]["retry_on"].split(",")).isdisjoint(
        {"reset", "unavailable", "5xx"}
    )
    expression = repeated[1]["match"]["safe_regex"]["regex"]
    for path in ("m/infer", "m/versions/2/infer", "m/generate", "m/generate_stream"):
        assert re.fullmatch(expression, f"/v2/models/{path}")
    for path in (
        "models/m/trace/setting",
        "repository/models/m/load",
        "systemsharedmemory/region/r/register",
    ):
        assert not re.fullmatch(expression, f"/v2/{path}")
    assert {one["route"]["timeout"] for one in (*repeated, rest)} == {"0s"}


def test_inference_that_may_not_run_twice_is_repeated_only_unseen(tmp_path: Path) -> None:
    made = exported_files(tmp_path, {"name": "once", "retry_on_worker_death": False}, {})
    (listener, *_) = parsed(made)["static_resources"]["listeners"]
    (host,) = listener["filter_chains"][0]["filters"][0]["typed_config"]["route_config"]["virtual_hosts"]
    rpc, over_http, read, rest = [one["route"] for one in host["routes"] if "route" in one]
    assert rpc["retry_policy"] == over_http["retry_policy"] == rest["retry_policy"]
    assert "retry_policy" not in read
    validated(tmp_path, made)


# ---- the command ----------------------------------------------------------------------------


def test_the_command_writes_to_stdout_or_into_a_folder(tmp_path: Path) -> None:
    config = written(tmp_path)
    shown = export("envoy", config)
    assert shown.returncode == 0
    assert shown.stdout.startswith("# Envoy in front of double")
    assert export("envoy", config, "--out", tmp_path / "out").returncode == 0
    assert (tmp_path / "out" / "envoy.yaml").read_text() == shown.stdout
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["envoy.yaml"]


def test_tls_takes_a_folder(tmp_path: Path) -> None:
    config = written(tmp_path)
    refused = export("envoy", config, "--tls-secret", "certificate")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "expected a folder: with TLS there are several files" in refused.stderr
    done = export("envoy", config, "--tls-secret", "certificate", "--out", tmp_path / "out")
    assert done.returncode == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "authority.yaml",
        "certificate.yaml",
        "envoy.yaml",
    ]


@pytest.mark.parametrize(
    ("server", "said"),
    [
        ({"grpc_port": 0}, "server.grpc_port: 0 picks a free port, and a Service needs a fixed one"),
        ({"http_port": None, "grpc_port": None}, "server.http_port: neither HTTP nor gRPC is served"),
        ({"host": "127.0.0.1"}, "server.host: '127.0.0.1' cannot be reached from outside a pod"),
    ],
)
def test_pods_that_nobody_could_reach(tmp_path: Path, server: dict[str, Any], said: str) -> None:
    done = export("envoy", written(tmp_path, **server), "--out", tmp_path / "out")
    assert done.returncode == 4
    assert said in done.stderr
    assert not (tmp_path / "out").exists()


def test_a_token_is_written_only_where_health_needs_it(tmp_path: Path) -> None:
    restricted = {"restricted_endpoints": ["inference"], "access_token": TOKEN}
    assert TOKEN not in export("envoy", written(tmp_path, **restricted)).stdout
    restricted["restricted_endpoints"] = ["health"]
    assert TOKEN in export("envoy", written(tmp_path, **restricted)).stdout
    assert TOKEN not in export("envoy", written(tmp_path, **restricted, health_port=8003)).stdout
