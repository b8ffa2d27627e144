"""What is in deploy/ is what `gpuserve export` writes today."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from manifests import DEPLOY
from serving import GPUSERVE, REPOSITORY

#: What an example is made of, and what says how.
SOURCES = {Path("README.md"), Path("gpu/config.yaml"), Path("gpu/projection.py")}


@pytest.mark.thorough
def test_the_rendered_examples_are_in_step(tmp_path: Path) -> None:
    command = [str(REPOSITORY / "scripts" / "render_deploy"), str(tmp_path)]
    environ = {**os.environ, "GPUSERVE": GPUSERVE, "GPUSERVE_SERVER__HTTP_PORT": "9999"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path) == contents(DEPLOY), "scripts/render_deploy writes them anew"


def contents(root: Path) -> dict[Path, str]:
    files = {path.relative_to(root): path for path in root.rglob("*") if path.is_file()}
    rendered = {name for name in files if name.suffix in (".yaml", ".json")} - SOURCES
    assert files.keys() - rendered <= SOURCES | {name for name in files if "__pycache__" in name.parts}
    return {name: files[name].read_text() for name in rendered}
