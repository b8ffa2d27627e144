"""The Dockerfile: what a linter says, and what it must agree on with the manifests and the package."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from serving import REPOSITORY

from gpuserve.cli.export.manifest_values import POD_UID

DOCKERFILE = REPOSITORY / "Dockerfile"
HADOLINT = str(Path(sys.executable).with_name("hadolint"))


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's instructions, each with its arguments on one line."""
    text = re.sub(r"^\s*#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [
        (word, rest.strip()) for word, _, rest in (line.partition(" ") for line in text.splitlines()) if word
    ]


def test_the_linter_has_nothing_to_say() -> None:
    done = subprocess.run([HADOLINT, str(DOCKERFILE)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_it_runs_as_the_user_of_the_manifests() -> None:
    users = [rest for word, rest in instructions() if word == "USER"]
    assert users == [f"{POD_UID}:{POD_UID}"]
    assert any(word == "RUN" and f"useradd --uid {POD_UID}" in rest for word, rest in instructions())


def test_what_builds_is_not_in_the_image() -> None:
    stages = [rest.split(" AS ")[1] for word, rest in instructions() if word == "FROM"]
    assert stages == ["build", "serve"]
    last = instructions()[[word for word, _ in instructions()].index("FROM") + 1 :]
    last = last[[word for word, _ in last].index("FROM") + 1 :]
    assert [rest for word, rest in last if word == "COPY"] == ["--from=build /opt/gpuserve /opt/gpuserve"]
    assert not any("pip" in rest for word, rest in last if word == "RUN")


def test_it_copies_what_the_package_is_made_of() -> None:
    copied = {name for word, rest in instructions() if word == "COPY" for name in rest.split()[:-1]}
    kept = {line[1:] for line in (REPOSITORY / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    assert copied - {"--from=build", "/opt/gpuserve"} == kept == {
        "LICENSE", "gpuserve", "gpuserve_worker", "pyproject.toml", "README.md", "scripts/packaging",
    }  # fmt: skip
    assert all((REPOSITORY / name).exists() for name in kept)


def test_the_extras_that_it_names_are_there() -> None:
    there = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    named = re.search(r"# EXTRAS .*with commas: (.*)", DOCKERFILE.read_text())
    assert named is not None
    assert set(named[1].split(", ")) <= there.keys()


def test_the_command_is_that_of_the_manifests() -> None:
    found = dict(instructions())
    assert found["ENTRYPOINT"] == '["gpuserve"]'
    assert found["EXPOSE"] == "8000 8001 8002"
