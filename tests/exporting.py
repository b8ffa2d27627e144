"""Configurations to export, written as short as a test needs them. No test is here."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from manifests import documents

from gpuserve.cli.app import run
from gpuserve.cli.export.export_options import ExportOptions
from gpuserve.cli.export.rendering import kubernetes_stream
from gpuserve.config.load import Configuration, load_file

IMAGE = "registry.example/gpuserve:1.0"
OPTIONS = ExportOptions(image=IMAGE)
MODEL: dict[str, Any] = {
    "name": "double",
    "callable": "double.py:double",
    "inputs": [{"name": "x", "dtype": "float32", "shape": [16]}],
    "outputs": [{"name": "y", "dtype": "float32", "shape": [16]}],
    "max_batch_size": 8,
}


def written(folder: Path, *models: dict[str, Any], **server: Any) -> Path:
    """A config file with these models, each over ``MODEL``, and their callable beside it."""
    (folder / "double.py").write_text("def double(requests):\n    return []\n")
    config = folder / "config.yaml"
    data = {"server": server, "models": [{**MODEL, **one} for one in models or ({},)]}
    config.write_text(yaml.safe_dump(data, sort_keys=False))
    return config


def loaded(folder: Path, *models: dict[str, Any], **server: Any) -> Configuration:
    return load_file(str(written(folder, *models, **server)), {})


def exported(
    folder: Path, *models: dict[str, Any], options: dict[str, Any] | None = None, **server: Any
) -> Any:
    """The objects of the base."""
    configuration = loaded(folder, *models, **server)
    return documents(kubernetes_stream(configuration, replace(OPTIONS, **(options or {}))))


@dataclass(frozen=True)
class Done:
    """What a command did."""

    returncode: int
    stdout: str
    stderr: str


def export(*arguments: str | Path) -> Done:
    """``gpuserve export`` as a user types it; in this process, which is quicker."""
    stdout, stderr = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = run(["export", *map(str, arguments)])
    return Done(code, stdout.getvalue(), stderr.getvalue())
