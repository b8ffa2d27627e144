"""The documentation site: built without the network and without a warning, and whole by itself."""

from __future__ import annotations

import importlib
import re
import sys
from pathlib import Path

import pytest
import typer
from processes import finished
from serving import REPOSITORY

from gpuserve.cli.app import build_app

pytest.importorskip("furo", reason="the extra docs is not installed")
pytestmark = pytest.mark.thorough

#: Sphinx in a process that may not open a connection.
_OFFLINE = """
import runpy, sys
def refuse(event, arguments):
    if event in {"socket.connect", "socket.getaddrinfo"}:
        raise PermissionError(f"the site is built without the network: {event}{arguments}")
sys.addaudithook(refuse)
runpy.run_module("sphinx", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-c", _OFFLINE, "-W", "--keep-going", "-q", "-E", "-c", "docs/site", "-d"]
    done = finished([*command, f"{folder}/.doctrees", ".", folder], cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return folder


def test_no_page_needs_anything_from_elsewhere(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    loads = re.compile(
        r"<(?:script|img|iframe|link(?![^>]*canonical))[^>]*(?:src|href)=\"(?:https?:)?//[^\"]*\""
    )
    assert len(pages) > 30
    assert [found for page in pages for found in loads.findall(page.read_text())] == []


def test_every_link_between_pages_and_to_files_leads_somewhere(site: Path) -> None:
    links = re.compile(r"<(?:a|img)\b[^>]*(?:href|src)=\"(?![a-z]+:|#)([^\"#]+)")
    missing = {
        (page.relative_to(site), link)
        for page in site.rglob("*.html")
        for link in links.findall(page.read_text())
        if not (page.parent / link).exists()
    }
    assert missing == set()


def test_the_reference_of_the_command_line_has_every_verb_and_option(site: Path) -> None:
    page = re.sub(r"<[^>]+>", "", (site / "docs" / "command-line.html").read_text())
    verbs = typer.main.get_command(build_app()).commands  # type: ignore[attr-defined]
    options = {
        option for verb in verbs.values() for one in verb.params for option in one.opts if option[0] == "-"
    }
    assert [verb for verb in verbs if f"gpuserve {verb}" not in page] == []
    assert [option for option in options if option not in page] == []


def test_the_reference_of_the_api_has_every_public_name(site: Path) -> None:
    page = (site / "docs" / "api.html").read_text()
    modules = re.findall(
        r"made of the code: public names, ([\w.]+)", (REPOSITORY / "docs" / "api.md").read_text()
    )
    assert len(modules) >= 7
    for module in modules:
        names = importlib.import_module(module).__all__
        assert [name for name in names if f"{module}.{name}" not in page and f">{name}<" not in page] == []
