"""A pod as the manifest describes it, without a cluster: its files, command, environment and probes."""

from __future__ import annotations

import json
import os
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from gpu_machine import GPU_0, GpuMachine, real_gpu
from manifests import DEPLOY, kustomized, only
from serving import GPUSERVE, JSON_LOG, serving

#: A HealthCheckResponse.
_SERVING = b"\x08\x01"


@pytest.fixture(scope="module")
def built() -> list[dict[str, Any]]:
    return kustomized(DEPLOY / "quickstart" / "kubernetes" / "base")


def test_the_pod_serves_and_its_probes_are_answered(
    built: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (container,) = only(built, "Deployment")["spec"]["template"]["spec"]["containers"]
    for name, text in only(built, "ConfigMap")["data"].items():
        (tmp_path / name).write_text(text)
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    folder = next(one["mountPath"] for one in container["volumeMounts"] if one["name"] == "config")
    program, *arguments = container["command"]
    assert program == os.path.basename(GPUSERVE)
    command = [GPUSERVE, *(one.replace(folder, str(tmp_path)) for one in arguments)]
    with serving(*command) as server, grpc.insecure_channel(server.grpc) as channel:
        check = channel.unary_unary("/grpc.health.v1.Health/Check", lambda raw: raw, lambda raw: raw)
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            service = container[probe]["grpc"]["service"].encode()
            assert check(b"\x0a" + bytes([len(service)]) + service, timeout=10) == _SERVING, probe
        body = {"inputs": [{"name": "content", "datatype": "BYTES", "shape": [1, 1], "data": ["#!/bin/sh"]}]}
        url = f"http://{server.http}/v2/models/content_type/infer"
        with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=10) as got:
            assert json.loads(got.read())["outputs"][0]["name"] == "label"


@pytest.mark.thorough
def test_the_gpu_example_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the GPU of this machine, or on the stand-in for one."""
    if not real_gpu():
        for name, value in GpuMachine(tmp_path / "gpus", [GPU_0]).environ.items():
            monkeypatch.setenv(name, value)
    config = str(DEPLOY / "gpu" / "config.yaml")
    matrix = np.random.default_rng(0).standard_normal((768, 256), dtype=np.float32)
    body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 768], "data": [1.0] * 768}]}
    with serving(GPUSERVE, "serve", config, "--health-port", "0", *JSON_LOG) as server:
        url = f"http://{server.http}/v2/models/projection/infer"
        with urllib.request.urlopen(url, json.dumps(body).encode(), timeout=20) as got:
            answer = json.loads(got.read())["outputs"][0]
    assert np.allclose(answer["data"], matrix.sum(0), rtol=1e-3, atol=1e-3)
