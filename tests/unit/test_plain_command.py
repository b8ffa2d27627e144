"""Command lines that are read without typer are read as typer reads them, and others are left to it."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from gpuserve.cli.app import build_app
from gpuserve.cli.serve_command_line import flag_name, is_switch, option_paths, overrides, parse_plain_command
from gpuserve.config.repositories import CallableFlags

EVERY_FLAG = [
    word
    for number, path in enumerate(option_paths())
    for word in (flag_name(path), *([] if is_switch(path) else [str(number)]))
]


def by_typer(arguments: list[str]) -> tuple[Any, ...]:
    """What typer gives the verb, put together as the verb does it."""
    group: Any = typer.main.get_command(build_app())
    given = group.commands["serve"].make_context("serve", list(arguments)).params
    names = ("name", "inputs", "outputs", "max_batch_size", "devices", "instances")
    own = {name: given.pop(name) for name in names}
    lists = {name: own.pop(name) or () for name in ("inputs", "outputs", "devices")}
    return given.pop("target"), CallableFlags(**own, **lists), overrides(given)


@pytest.mark.parametrize(
    "line",
    [
        "config.yaml",
        "--http-port 0 config.yaml --log-format=json",
        "config.json --trace-level [TIMESTAMPS] --access-token= --tls-certfile null",
        "c.yaml --http-port 1 --http-port 2 --server-name=a=b",
        "m.py:f --input x:FP32:-1 --input=y:FP32: --output z:bytes:1 --name n",
        "pkg.mod:f --device cuda:0 --device=cpu --instances 2 --max-batch-size=8",
        f"c.yaml {' '.join(EVERY_FLAG)}",
        "--admin-api c.yaml --no-attachable",
        "c.yaml --admin-api --no-admin-api --no-attachable --attachable",
    ],
)
def test_plain_lines_are_read_as_typer_reads_them(line: str) -> None:
    assert parse_plain_command(line.split()) == by_typer(line.split())


@pytest.mark.parametrize(
    "line",
    [
        "",
        "a.yaml b.yaml",
        "nothing-of-the-kind",
        "a.yaml --htp-port 0",
        "a.yaml --http-port",
        "a.yaml --http-port --log-format",
        "a.yaml --drain-timeout-s -1",
        "a.yaml -- b",
        "a.yaml -h",
        "a.yaml --admin-api=true",
        "a.yaml --no-http-port",
        "a.yaml --instances 2",
        "m.py:f --instances two",
        "m.py:f --max-batch-size \u0662",
    ],
)
def test_others_are_left_to_typer(line: str) -> None:
    assert parse_plain_command(line.split()) is None


def test_a_shell_that_completes_asks_typer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_GPUSERVE_COMPLETE", "complete_bash")
    assert parse_plain_command(["a.yaml"]) is None
