"""Every numeric option, given a number that cannot be: refused with its name, whoever gives it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpuserve.config.load import load_file
from gpuserve.config.problems import ConfigProblems
from gpuserve.config.schema import json_schema
from gpuserve.config.settings.server import ServerSettings, TraceSettings
from gpuserve.model.options import checked, rows
from gpuserve.model.spec import BatchingSpec, PolicySpec, QueueSpec

NUMBERS = ["1" + "0" * 400, "-1" + "0" * 400, "18446744073709551616", "0x" + "f" * 5000]
NUMBERS += ["1e400", ".inf", "-.inf", ".nan"]
#: Read as a length of time.
DURATIONS = ["9" * 400, "9" * 400 + "s", "1" + "0" * 330 + "us"]
MODEL: dict[str, Any] = {"name": "m", "callable": "pkg.mod:f"}
MODEL["inputs"] = [{"name": "x", "dtype": "FP32", "shape": [1]}]
MODEL["outputs"] = [{"name": "y", "dtype": "FP32", "shape": [1]}]


def _numeric(schema: dict[str, Any], name: str) -> Iterator[tuple[str, ...]]:
    """Give the path of every key under a mapping of the schema that takes a number."""
    for key, one in schema["$defs"][name]["properties"].items():
        for kind in _kinds(one):
            if kind.get("type") in {"integer", "number"}:
                yield (key,)
            elif reference := kind.get("$ref"):
                for rest in _numeric(schema, reference.rpartition("/")[2]):
                    yield (key, *rest)


def _kinds(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Give what a value may be, of any number of alternatives."""
    if "anyOf" in schema:
        for one in schema["anyOf"]:
            yield from _kinds(one)
    else:
        yield schema


def _keys() -> list[tuple[str, ...]]:
    schema = json_schema()
    found = [("server", *path) for path in _numeric(schema, "ServerEntry")]
    return found + [("model", *path) for path in _numeric(schema, "ModelEntry")]


def _file(path: tuple[str, ...], text: str) -> str:
    """A config file with that text as the value at a path."""
    document: dict[str, Any] = {"server": {}, "models": [dict(MODEL)]}
    where = document["server"] if path[0] == "server" else document["models"][0]
    for step in path[1:-1]:
        where = where.setdefault(step, {})
    where[path[-1]] = "HERE"
    return json.dumps(document).replace('"HERE"', text)


def test_a_file_with_such_a_number_is_refused_at_its_place(tmp_path: Path) -> None:
    keys = _keys()
    assert len(keys) > 50
    path = tmp_path / "config.yaml"
    for key in keys:
        for text in (*NUMBERS, *(DURATIONS[1:] if key[-1].endswith(("_s", "_us")) else ())):
            path.write_text(_file(key, text))
            with pytest.raises(ConfigProblems) as refused:
                load_file(str(path), {})
            assert "config.yaml:1:" in str(refused.value), (key, text)
            assert key[-1] in str(refused.value), (key, text)


def test_a_variable_with_such_a_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps({"models": [MODEL]}))
    for key in _keys():
        if key[0] == "server":
            name = "__".join(("GPUSERVE_SERVER", *key[1:])).upper()
            for text in NUMBERS:
                with pytest.raises(ConfigProblems, match=name):
                    load_file(str(path), {name: text})


@pytest.mark.parametrize("table", [ServerSettings, TraceSettings, BatchingSpec, QueueSpec, PolicySpec])
def test_a_program_that_gives_such_a_number_is_refused(table: type) -> None:
    values = [10**400, -(10**400), 2**64, 16**5000, float("inf"), float("-inf"), float("nan")]
    for name, row in rows(table).items():
        if row.hint in {int, float}:
            for value in values:
                with pytest.raises(ValueError, match=name):
                    checked(row, value, name)
