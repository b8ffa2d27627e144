"""``gpuserve tune`` starts real servers, and writes a config that one can be started with."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest
from processes import finished
from serving import GPUSERVE

MODELS = Path(__file__).resolve().parents[1] / "models"
TIMEOUT_S = 90.0
CONFIG = f"""\
# kept
server: {{host: 127.0.0.1, http_port: 1}}
models:
  - name: echo   # kept as well
    callable: {MODELS}/v2_models.py:echo
    inputs: [{{name: x, dtype: FP32, shape: [-1]}}]
    outputs: [{{name: y, dtype: FP32, shape: [-1]}}]
    max_batch_size: 2
"""
SHORT = ("--duration", "0.3", "--warmup", "0", "--shape", "x:4")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.yaml"
    path.write_text(CONFIG)
    return path


def tune(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return finished([GPUSERVE, "tune", *map(str, arguments)], env={**os.environ, "COLUMNS": "200"})


@pytest.mark.thorough
def test_a_search(config: Path, tmp_path: Path) -> None:
    best = tmp_path / "best.yaml"
    axes = ("--max-batch-sizes", "2,8", "--delays-us", "0", "--instances", "1", "--prefetch", "0")
    limit = ("--latency-limit", "p99=20s", "--concurrency", "1,8", "--output", str(best))
    done = tune(config, *SHORT, *axes, *limit)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert lines[0] == "echo"
    assert lines[1].startswith("  1  max_batch_size 2: ")
    assert lines[2].startswith("  2  max_batch_size 8: ")
    assert len(lines) == 4
    assert done.stdout.startswith("# echo\n\n| max batch sizes | in flight | req/s | p99 ms |  |\n")
    assert done.stdout.count("| best |") == 1
    written = best.read_text()
    assert written in {config.read_text(), config.read_text().replace("batch_size: 2", "batch_size: 8")}
    changes = "as it was" if written == config.read_text() else "with models[0].max_batch_siz"
    assert lines[3].startswith(f"{best} is {config} {changes}")
    assert subprocess.run([GPUSERVE, "check", str(best)], check=False, capture_output=True).returncode == 0


@pytest.mark.thorough
def test_a_limit_that_nothing_stays_under(config: Path, tmp_path: Path) -> None:
    axes = ("--max-batch-sizes", "2", "--delays-us", "0", "--instances", "1", "--prefetch", "0")
    limit = ("--latency-limit", "p50=1us", "--concurrency", "1", "--trials", "1")
    done = tune(config, *SHORT, *axes, *limit, "--output", tmp_path / "best.yaml")
    assert done.returncode == 1
    assert "echo: no settings that were tried stay under the latency limit" in done.stderr
    assert not (tmp_path / "best.yaml").exists()


@pytest.mark.thorough
def test_ctrl_c_gives_the_best_so_far(config: Path, tmp_path: Path) -> None:
    best = tmp_path / "best.yaml"
    command = [GPUSERVE, "tune", str(config), *SHORT, "--concurrency", "1", "--output", str(best)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while (line := process.stderr.readline()) and not line.startswith("  1  "):
            pass
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    assert "the search was interrupted" in err
    assert "| best |" in out
    assert "# kept" in best.read_text() or best.read_text() == config.read_text()


@pytest.mark.thorough
def test_nothing_stays_behind_after_a_kill(config: Path) -> None:
    command = [GPUSERVE, "tune", str(config), *SHORT, "--concurrency", "1"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        while (line := process.stderr.readline()) and not line.startswith("  1  "):
            pass
        process.kill()
    assert line.startswith("  1  ")
    assert process.returncode == -signal.SIGKILL  # the rest is looked for after every test


@pytest.mark.thorough
def test_a_file_that_does_not_start(config: Path) -> None:
    config.write_text(config.read_text().replace(":echo\n", ":absent\n"))
    done = tune(config, *SHORT)
    assert done.returncode == 1
    assert "absent" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--latency-limit", "50ms"), "--latency-limit: expected one of mean, p50"),
        (("--time-budget", "soon"), "'--time-budget': expected a number of seconds or a time such as 500ms"),
        (("--model", "other"), "--model: the file has no model 'other', only echo"),
        (("--prefetch", "99"), "--prefetch: expected whole numbers from 0 to 16"),
        (("--output", "absent/best.yaml"), "--output: there is no folder 'absent'"),
        (("--protocol", "udp"), "--protocol: expected grpc or http, given 'udp'"),
        (("--concurrency", "x"), "--concurrency: expected a number"),
    ],
)
def test_a_wrong_option_is_one_sentence(arguments: tuple[str, ...], said: str, config: Path) -> None:
    done = tune(config, *arguments)
    assert done.returncode == 2
    assert said in " ".join(done.stderr.replace("│", "").split())
    assert "Traceback" not in done.stderr
