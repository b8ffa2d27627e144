"""The workflows of continuous integration: valid by the schema, with the least permissions, of actions that
are pinned, and running scripts that are there.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from typing import Any

import pytest
import yaml
from serving import REPOSITORY

WORKFLOWS = sorted((REPOSITORY / ".github" / "workflows").glob("*.yaml"))
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
READ_ONLY = {"contents": "read"}
#: Jobs that may do more than read: publish a page, a package by identity, a release, images, code alerts.
WRITES = {
    ("docs", "publish"): {"id-token": "write", "pages": "write"},
    ("wheels", "publish"): {"id-token": "write"},
    ("wheels", "release"): {"contents": "write"},
    ("images", "image"): {"contents": "read", "packages": "write"},
    ("security", "codeql"): {"contents": "read", "security-events": "write"},
}


def jobs() -> list[tuple[str, str, dict[str, Any]]]:
    return [
        (path.stem, name, job)
        for path in WORKFLOWS
        for name, job in yaml.safe_load(path.read_text())["jobs"].items()
    ]


def steps() -> list[dict[str, Any]]:
    return [step for _, _, job in jobs() for step in job["steps"]]


def test_every_workflow_is_known() -> None:
    assert [path.stem for path in WORKFLOWS] == ["ci", "docs", "fuzz", "images", "security", "wheels"]


@pytest.mark.thorough
def test_they_are_valid_by_the_schema() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows"]
    done = subprocess.run([*command, *map(str, WORKFLOWS)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_only_what_publishes_may_write() -> None:
    for path in WORKFLOWS:
        assert yaml.safe_load(path.read_text())["permissions"] == READ_ONLY, path.name
    granted = {(path, name): job["permissions"] for path, name, job in jobs() if "permissions" in job}
    assert granted == WRITES


def test_actions_are_pinned_and_a_checkout_leaves_no_token() -> None:
    for step in (step for step in steps() if "uses" in step):
        assert re.fullmatch(r"[\w-]+(/[\w-]+)+@(v\d+|release/v\d+)", step["uses"])
        if step["uses"].startswith("actions/checkout@"):
            assert step["with"]["persist-credentials"] is False


def test_every_job_ends() -> None:
    assert [name for _, name, job in jobs() if "timeout-minutes" not in job] == []


def test_scripts_that_are_run_are_there() -> None:
    run = {word for step in steps() for word in re.findall(r"scripts/\w+", step.get("run", ""))}
    assert run >= {"scripts/docs", "scripts/fuzz", "scripts/test", "scripts/test_thorough"}
    assert all((REPOSITORY / script).stat().st_mode & 0o111 for script in run)


def test_each_python_of_the_classifiers_is_run() -> None:
    prefix = "Programming Language :: Python :: "
    said = {one.removeprefix(prefix) for one in PROJECT["classifiers"] if one.startswith(prefix)}
    matrices = {(path, name): job["strategy"]["matrix"] for path, name, job in jobs() if "strategy" in job}
    assert set(matrices["wheels", "install"]["python"]) == said
    assert set(matrices["ci", "tests"]["python"]) == {min(said), max(said)}
