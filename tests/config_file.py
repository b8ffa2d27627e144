"""Config files for servers of the tests, and many small models to put into one."""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from serving import GPUSERVE, Addresses, serving

from gpuserve.config.load import Configuration, load_file
from gpuserve.config.problems import ConfigProblems

MODELS = Path(__file__).resolve().parent / "models" / "v2_models.py"
DATATYPES = (
    "BOOL", "INT8", "INT16", "INT32", "INT64", "UINT8", "UINT16", "UINT32", "UINT64",
    "FP16", "BF16", "FP32", "FP64", "BYTES",
)  # fmt: skip


def tensor(name: str, dtype: str, *shape: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "dtype": dtype, "shape": list(shape), **more}


def model(
    name: str, attribute: str, inputs: list[Any], outputs: list[Any], size: int = 0, **more: Any
) -> dict[str, Any]:
    return {
        "name": name,
        "callable": f"{MODELS}:{attribute}",
        "inputs": inputs,
        "outputs": outputs,
        "max_batch_size": size,
        **more,
    }


def models(*names: str) -> list[dict[str, Any]]:
    """echo_<DATATYPE>, flat_<DATATYPE> (not batching), and one for each other behaviour; or those named."""
    made = [
        model(f"echo_{one}", "echo", [tensor("x", one, -1)], [tensor("y", one, -1)], 64) for one in DATATYPES
    ]
    made += [
        model(f"flat_{one}", "echo_list", [tensor("x", one)], [tensor("y", one)]) for one in ("FP32", "BYTES")
    ]
    made += [
        model("cube", "echo", [tensor("x", "FP32", -1, 2, 3)], [tensor("y", "FP32", -1, 2, 3)], 8),
        model(
            "optional",
            "optional",
            [tensor("a", "FP32", 1), tensor("b", "FP32", 1, optional=True)],
            [tensor("sum", "FP32", 1), tensor("given", "BYTES", 1)],
            8,
        ),
        model(
            "parameters",
            "parameters",
            [tensor("x", "FP32", 1)],
            [tensor("seen", "BYTES", 1), tensor("wanted", "BYTES", 1)],
            4,
        ),
        model(
            "batch_rows",
            "batch_rows",
            [tensor("x", "INT32", -1)],
            [tensor("rows", "INT32", 1), tensor("y", "INT32", -1)],
            64,
            batching={"max_queue_delay_us": 20_000},
        ),
    ]
    return [one for one in made if not names or one["name"] in names]


def write_config(folder: Path, entries: list[dict[str, Any]], **server: Any) -> Path:
    """A config file of a server that ends quickly; JSON is YAML."""
    path = folder / "config.yaml"
    server = {"log_format": "json", "lame_duck_s": 0, **server}
    path.write_text(json.dumps({"server": server, "models": entries}))
    return path


def served(
    folder: Path, entries: list[dict[str, Any]], *flags: str, **server: Any
) -> AbstractContextManager[Addresses]:
    """A server of these models for clients on this machine, from ready until it has ended with 0."""
    path = write_config(folder, entries, **{"host": "127.0.0.1", **server})
    return serving(GPUSERVE, "serve", str(path), *flags)


def load_text(folder: Path, text: str, environ: dict[str, str] | None = None) -> Configuration:
    """Load a config file with this text."""
    path = folder / "config.yaml"
    path.write_text(text)
    return load_file(str(path), environ or {})


def problems_of(folder: Path, text: str, environ: dict[str, str] | None = None) -> list[str]:
    """Return the messages of all problems of a config file with this text, without the folder."""
    with pytest.raises(ConfigProblems) as caught:
        load_text(folder, text, environ)
    return [str(problem).replace(f"{folder}/", "") for problem in caught.value.problems]
