"""Unit files for systemd: the ports and the command of a config, and refusals."""

from __future__ import annotations

import configparser
import os
from pathlib import Path

import pytest
from exporting import export
from serving import GPUSERVE

CONFIG = """
server: {{{server}}}
models:
  - {{name: m, callable: m.py:f, inputs: [{{name: x, dtype: float32, shape: [1]}}],
     outputs: [{{name: y, dtype: float32, shape: [1]}}]}}
"""


def read(path: Path) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read(path)
    return parser


def test_units_have_the_ports_and_the_command_of_the_config(tmp_path: Path) -> None:
    folder = tmp_path / "100% mine"
    folder.mkdir()
    config = folder / "c.yaml"
    server = "host: localhost, grpc_port: null, health_port: 9, lame_duck_s: 7, drain_timeout_s: 20"
    config.write_text(CONFIG.format(server=server))
    (folder / "m.py").write_text("")
    export("systemd", str(config), "--name", "mine", "--user", "models", "--out", str(tmp_path))
    listens = [one for one in (tmp_path / "mine.socket").read_text().splitlines() if "ListenStream" in one]
    assert [one.rpartition(":")[2] for one in listens] == ["8000", "8002", "9"]
    assert all("127.0.0.1:" in one or "[::1]:" in one for one in listens)
    service = read(tmp_path / "mine.service")["Service"]
    escaped = str(config).replace("%", "%%")
    assert service["ExecStart"] == f'{GPUSERVE} serve "{escaped}"'
    assert (service["User"], service["TimeoutStopSec"]) == ("models", "57")
    assert "LimitMEMLOCK" not in service
    assert os.path.basename(service["WorkingDirectory"]) == "100%% mine"


@pytest.mark.parametrize(
    ("server", "expected"),
    [("http_port: 0", "fixed port"), ("host: no.such.host.invalid", "host with an address")],
)
def test_ports_that_systemd_cannot_keep_are_refused(tmp_path: Path, server: str, expected: str) -> None:
    config = tmp_path / "c.yaml"
    config.write_text(CONFIG.format(server=server))
    (tmp_path / "m.py").write_text("")
    done = export("systemd", config)
    assert done.returncode == 4
    assert expected in done.stderr
    assert f"{config}:2:" in done.stderr
