"""``gpuserve bench`` against real servers, as a user runs it."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from client_server import model, tensor
from config_file import served
from exploring import variants
from operated import InBackground
from processes import finished, wait_until
from serving import GPUSERVE, Addresses, answered
from tls import Authority

SHORT = ("--duration", "0.4", "--warmup", "0.1")
TIMEOUT_S = 60.0


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Addresses]:
    floats = [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)]
    numbers = [tensor("x", "INT32", -1)], [tensor("y", "INT32", -1)]
    text = [tensor("x", "BYTES", -1)], [tensor("y", "BYTES", -1)]
    models = [
        model("echo", "v2_models.py:echo", *floats, 64, version=3),
        model("text", "v2_models.py:echo", *text, 8),
        model("negative", "raises.py:negative", *floats, 4),
        model("count", "streams.py:count", *numbers, 4, decoupled=True),
    ]
    folder = tmp_path_factory.mktemp("server")
    with served(folder, models) as addresses:
        yield addresses


def bench(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return finished([GPUSERVE, "bench", *arguments], env={**os.environ, "COLUMNS": "200", **environment})


def measured(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    """The levels of a run that went well."""
    path = folder / "report.json"
    done = bench(*arguments, *SHORT, "--output", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(path.read_text())
    assert [one for one in report["levels"] if one["failures"] or not one["completed"]] == []
    levels: list[dict[str, Any]] = report["levels"]
    return levels


@pytest.mark.parametrize("protocol", variants("grpc", "http"))
def test_closed_loop(protocol: str, server: Addresses, tmp_path: Path) -> None:
    url = f"{protocol}://{getattr(server, protocol)}"
    one, eight = measured(tmp_path, "echo", "--url", url, "--shape", "x:16", "--concurrency", "1,8")
    for level in (one, eight):
        latency = level["latency"]
        assert 0 < latency["p50_ms"] <= latency["p99_ms"] <= latency["max_ms"]
        assert level["throughput"] == pytest.approx(level["completed"] / level["duration_s"], rel=0.01)
        assert level["server"]["requests"] > 0
        assert level["server"]["compute_infer_ms"] > 0
    assert eight["server"]["rows_per_execution"] >= 1


@pytest.mark.thorough
@pytest.mark.parametrize("protocol", variants("grpc", "http"))
def test_open_loop(protocol: str, server: Addresses, tmp_path: Path) -> None:
    url = f"{protocol}://{getattr(server, protocol)}"
    load = ("--rate", "200", "--arrivals", "constant", "--processes", "2", "--seed", "3")
    (level,) = measured(tmp_path, "echo", "--url", url, "--shape", "x:16", *load)
    assert level["sent"] == pytest.approx(200 * level["duration_s"], abs=20)
    assert level["latency"]["count"] == level["sent"]


@pytest.mark.thorough
@pytest.mark.parametrize("protocol", variants("grpc", "http"))
def test_streams(protocol: str, server: Addresses, tmp_path: Path) -> None:
    (tmp_path / "data.json").write_text('{"data": [{"x": [[20]]}]}')
    url = f"{protocol}://{getattr(server, protocol)}"
    table = tmp_path / "table.md"
    data = ("--data", str(tmp_path / "data.json"), "--concurrency", "2", "--stream", "--output", str(table))
    (level,) = measured(tmp_path, "count", "--url", url, *data)
    titles = [line.split(" | ") for line in table.read_text().splitlines() if line.startswith("| load")]
    assert titles[0][1:5] == ["req/s", "tokens/s", "tokens/s of one", "first p50 ms"]
    assert level["gaps"]["count"] == 19 * level["latency"]["count"]
    assert level["first"]["p50_ms"] <= level["latency"]["p50_ms"]
    assert level["responses_per_s"] > 10 * level["throughput"]


@pytest.mark.thorough
@pytest.mark.parametrize("protocol", ["grpc", "http"])
@pytest.mark.parametrize("name", ["echo", "text"])
def test_system_shared_memory(protocol: str, name: str, server: Addresses, tmp_path: Path) -> None:
    url = f"{protocol}://{getattr(server, protocol)}"
    memory = ("--shared-memory", "system", "--concurrency", "4", "--batch-size", "2")

    def regions() -> list[str]:
        _, _, body = answered(server.http, "GET", "/v2/systemsharedmemory/status")
        return [one["name"].rpartition("-")[2] for one in json.loads(body)]

    run = InBackground(measured, tmp_path, name, "--url", url, "--shape", "x:100", *memory)
    wait_until(lambda: sorted(regions()) == ["in", "out"], "regions for inputs and outputs")
    run.result()
    assert regions() == []


@pytest.mark.thorough
def test_large_requests(server: Addresses, tmp_path: Path) -> None:
    """Larger than every window of HTTP/2."""
    for url in (server.grpc, f"http://{server.http}"):
        measured(tmp_path, "echo", "--url", url, "--shape", "x:1000000", "--concurrency", "2")


@pytest.mark.thorough
def test_a_version_and_headers(server: Addresses, tmp_path: Path) -> None:
    options = ("--url", server.grpc, "--shape", "x:4", "--concurrency", "1", "--header", "x-a: b")
    measured(tmp_path, "echo", *options, "--model-version", "3")
    done = bench("echo", *options, "--model-version", "4")
    assert done.returncode == 1
    assert "NOT_FOUND" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.thorough
def test_failed_requests_are_counted(server: Addresses, tmp_path: Path) -> None:
    """The first request is answered, the other fails."""
    (tmp_path / "data.json").write_text('{"data": [{"x": [[1.0]]}, {"x": [[-1.0]]}]}')
    data = ("--data", str(tmp_path / "data.json"), "--concurrency", "2", *SHORT)
    for url in (server.grpc, f"http://{server.http}"):
        done = bench("negative", "--url", url, *data)
        assert done.returncode == 1
        assert "| failed |" in done.stdout
        assert "times " in done.stdout


@pytest.mark.thorough
def test_reports_and_a_baseline(server: Addresses, tmp_path: Path) -> None:
    load = ("echo", "--url", server.grpc, "--shape", "x:4", "--concurrency", "1:2", *SHORT)
    first = [f"{tmp_path / 'report'}.{ending}" for ending in ("json", "md", "csv", "html")]
    done = bench(*load, *(word for path in first for word in ("--output", path)))
    assert done.returncode == 0, done.stderr
    assert Path(first[1]).read_text() == done.stdout
    assert [float(row["concurrency"]) for row in csv.DictReader(Path(first[2]).read_text().splitlines())] == [
        1,
        2,
    ]
    assert Path(first[3]).read_text().count("<svg") == 3
    again = bench(*load, "--baseline", first[0])
    for title in ("req/s", "p50", "p99"):
        assert f"| {title} ratio |" in again.stdout


@pytest.mark.thorough
def test_ctrl_c_shows_what_is_measured(server: Addresses) -> None:
    levels = ("--concurrency", "1:1000", "--duration", "0.3", "--warmup", "0")
    command = [GPUSERVE, "bench", "echo", "--url", server.grpc, "--shape", "x:4", *levels]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        first = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert first.startswith("concurrency 1: ")
    assert process.returncode == 0, err
    assert "| 1 in flight |" in out
    assert "- the run was interrupted" in out


@pytest.mark.thorough
def test_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "ca")
    pair = authority.issue("server")
    files = {"tls_certfile": str(pair.certificate), "tls_keyfile": str(pair.key)}
    entry = model("echo", "v2_models.py:echo", [tensor("x", "FP32", -1)], [tensor("y", "FP32", -1)], 8)
    with served(tmp_path, [entry], **files) as addresses:
        load = ("echo", "--shape", "x:4", "--concurrency", "4", "--tls-ca", str(authority.certificate))
        for scheme, address in (("grpcs", addresses.grpc), ("https", addresses.http)):
            measured(tmp_path, *load, "--url", f"{scheme}://localhost:{address.rpartition(':')[2]}")
        unknown = bench("echo", "--url", f"https://localhost:{addresses.http.rpartition(':')[2]}")
        assert unknown.returncode == 1
        assert "certificate verify failed" in unknown.stderr
        assert "; --tls-ca names the file of the authority" in unknown.stderr
        for protocol, address in (("grpc", addresses.grpc), ("http", addresses.http)):
            plain = bench("echo", "--url", f"{protocol}://{address}")
            assert plain.stderr.rstrip().endswith(f"; a server with TLS needs {protocol}s://{address}")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "--shape: input 'x' has the shape [-1], where -1 is any size"),
        (("--shape", "x:4", "--concurrency", "0"), "--concurrency: expected levels above 0"),
        (("--concurrency", "1", "--rate", "1"), "--rate: does not go with --concurrency"),
        (("--shape", "z:4"), "--shape: model 'echo' has no input 'z', only x"),
        (("--batch-size", "65", "--shape", "x:1"), "--batch-size: model 'echo' takes at most 64, given 65"),
        (("--shared-memory", "disk"), "--shared-memory: expected one of none, system, cuda, given 'disk'"),
        (("--output", "x.pdf"), "--output: expected a file that ends in .md, .csv, .json, .html"),
        (("--baseline", "/absent.json"), "--baseline: /absent.json cannot be read"),
        (("--duration", "0"), "--duration: expected more than 0 seconds, given 0"),
        (("--timeout", "-1"), "'--timeout': expected a number of seconds or a time such as 500ms, 10s"),
        (("--tls-ca", "x"), "--tls-ca: goes with --url grpcs:// or https://"),
        (("--data", "absent.json"), "--data: absent.json cannot be read"),
        (("--stream", "--shape", "x:4"), "--stream: model 'echo' gives one response to a request"),
        (("--arrivals", "often"), "--arrivals: expected one of poisson, constant, given 'often'"),
    ],
)
def test_a_wrong_option_is_one_sentence(arguments: tuple[str, ...], said: str, server: Addresses) -> None:
    done = bench("echo", "--url", server.grpc, *arguments)
    assert done.returncode == 2
    assert f"Invalid value for {said}" in " ".join(done.stderr.replace("│", "").split())
    assert "Traceback" not in done.stderr


@pytest.mark.thorough
def test_a_server_that_is_not_there() -> None:
    for protocol in ("grpc", "http"):
        done = bench("echo", "--url", f"{protocol}://127.0.0.1:1")
        assert done.returncode == 1
        assert f"{protocol}://127.0.0.1:1 cannot be reached: " in done.stderr
        assert "refused" in done.stderr
        assert "Traceback" not in done.stderr


@pytest.mark.thorough
def test_a_missing_package_is_named(server: Addresses) -> None:
    program = (
        "import sys; sys.modules['hdrh'] = None; sys.modules['hdrh.histogram'] = None; "
        "from gpuserve.cli.app import run; sys.exit(run(sys.argv[1:]))"
    )
    done = finished([sys.executable, "-c", program, "bench", "echo", "--url", server.grpc])
    assert done.returncode == 1
    assert done.stderr == (
        "this needs the package hdrhistogram, which is not installed: pip install 'gpuserve[bench]'\n"
    )
