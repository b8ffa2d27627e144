"""The clients over TLS, by ``https://`` and ``grpcs://``, with the certificates that the system trusts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from client_server import PROTOCOLS, ClientServer, client_server, gate_of, unary_models
from tls import make_certificate, tls_before

PROGRAM = """
import asyncio, sys
import numpy as np
from gpuserve.client import AsyncioModelClient, ClientTimeoutError, ModelClient

url, trusted = sys.argv[1:]
row = np.ones(3, np.float32)
options = {} if trusted == "trusted" else {"init_timeout_s": 0.5}

async def ask():
    async with AsyncioModelClient(url, "echo", **options) as client:
        return await client.infer_sample(row)

def ask_blocking():
    with ModelClient(url, "echo", **options) as client:
        return client.infer_sample(row)

for one in (ask_blocking, lambda: asyncio.run(ask())):
    try:
        print(one()["y"].tolist())
    except ClientTimeoutError:
        print("refused")
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClientServer]:
    folder = tmp_path_factory.mktemp("client")
    models = [one for one in unary_models(gate_of(folder)) if one["name"] == "echo"]
    with client_server(folder, models) as running:
        yield running


@pytest.mark.thorough
@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("trusted", "expected"), [(True, "[1.0, 1.0, 1.0]"), (False, "refused")])
def test_tls(server: ClientServer, protocol: str, trusted: bool, expected: str, tmp_path: Path) -> None:
    certificate = make_certificate(tmp_path)
    roots = {"SSL_CERT_FILE": str(certificate), "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH": str(certificate)}
    address = getattr(server.addresses, protocol)
    with tls_before(address, certificate, "h2" if protocol == "grpc" else "http/1.1") as port:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, f"{protocol}s://localhost:{port}", "trusted" if trusted else ""],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, **(roots if trusted else {})},
        )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [expected] * 2
