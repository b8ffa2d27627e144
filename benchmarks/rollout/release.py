"""Releases: the same models under another number, exported as a user exports them.

The number is an argument of the callables, so each release is another config, another ConfigMap, other pods.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML

_SERVED: Final = Path(__file__).parent / "served"
_BIN: Final = Path(sys.executable).parent
_IMAGE: Final = "registry.example/rollout:1"
NAME: Final = "rollout"

#: A JSON patch of the Deployment, as an overlay of a user's own would have it.
Patch = Sequence[Mapping[str, Any]]


class ExportFailed(Exception):
    """``gpuserve export`` or ``kubectl kustomize`` refused; the text says why."""


@dataclass(frozen=True, slots=True)
class Releases:
    """Renders releases into a folder. ``settings`` go below ``server`` in the config, with the ports."""

    folder: Path
    replicas: int
    settings: Mapping[str, Any]
    patch: Patch = field(default=())

    def render(self, number: int, *, broken: bool = False) -> list[dict[str, Any]]:
        """The objects that ``kubectl apply`` would send.

        Raises:
            ExportFailed: the config cannot be exported.
        """
        folder = self._folder_of(number)
        shutil.rmtree(folder, ignore_errors=True)
        config = self._write_config(folder / "config", number, broken)
        _run("gpuserve", "export", "kubernetes", str(config), "--name", NAME, "--image", _IMAGE,
             "--replicas", str(self.replicas), "--out", str(folder / "cluster"))  # fmt: skip
        overlay = self._write_overlay(folder)
        return [one for one in YAML(typ="safe").load_all(_run("kubectl", "kustomize", str(overlay))) if one]

    def config(self, number: int) -> Path:
        """The config file of a release that was rendered."""
        return self._folder_of(number) / "config" / "config.yaml"

    def _folder_of(self, number: int) -> Path:
        return self.folder / f"release-{number}"

    def _write_config(self, folder: Path, number: int, broken: bool) -> Path:
        folder.mkdir(parents=True)
        shutil.copy(_SERVED / "models.py", folder)
        config = YAML(typ="safe").load((_SERVED / "config.yaml").read_text())
        config["server"] = dict(self.settings)
        for model in config["models"]:
            model["kwargs"]["release"] = number
            if "broken" in model["kwargs"]:
                model["kwargs"]["broken"] = broken
        path = folder / "config.yaml"
        path.write_text(_text(config))
        return path

    def _write_overlay(self, folder: Path) -> Path:
        overlay = folder / "overlay"
        overlay.mkdir()
        patches = [{"target": {"kind": "Deployment"}, "patch": _text(list(map(dict, self.patch)))}]
        document = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": ["../cluster/base"],
            **({"patches": patches} if self.patch else {}),
        }
        (overlay / "kustomization.yaml").write_text(_text(document))
        return overlay


def _text(document: Any) -> str:
    stream = io.StringIO()
    YAML().dump(document, stream)
    return stream.getvalue()


def _run(program: str, *arguments: str) -> str:
    done = subprocess.run([_BIN / program, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ExportFailed(f"{program} {arguments[0]}: {done.stderr.strip()}")
    return done.stdout
