"""The live page: files of our own that fetch nothing from elsewhere, and in which no name can run."""

from __future__ import annotations

import re

import pytest

from gpuserve.front.protocols.access.endpoints import Endpoint
from gpuserve.front.protocols.http.static_pages import dashboard_files

PAGE = dashboard_files()["page.html"]
HEADERS = dict(PAGE.head.headers)
POLICY = HEADERS[b"content-security-policy"].decode()
SCRIPTS = {name: one.body.decode() for name, one in dashboard_files().items() if name.endswith(".js")}
SINKS = (
    "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(", "srcdoc",
    "onclick=", "setAttribute(\"on", "import(", "localStorage", "sessionStorage", "cookie",
)  # fmt: skip


def test_the_policy_allows_files_of_the_server_and_nothing_inline() -> None:
    parts = dict(part.split(" ", 1) for part in POLICY.split("; "))
    assert parts["default-src"] == "'none'"
    assert parts["script-src"] == parts["style-src"] == parts["connect-src"] == "'self'"
    assert parts["form-action"] == parts["base-uri"] == parts["frame-ancestors"] == "'none'"
    assert "unsafe" not in POLICY
    assert "require-trusted-types-for" in parts


def test_the_page_has_nothing_that_the_policy_would_refuse() -> None:
    html = PAGE.body.decode()
    assert "<style" not in html
    assert not re.search(r"\sstyle=|\son\w+=", html)
    assert re.findall(r"<script(?![^>]*\ssrc=)", html) == []


@pytest.mark.parametrize("name", dashboard_files())
def test_nothing_comes_from_another_server(name: str) -> None:
    text = dashboard_files()[name].body.decode().replace("http://www.w3.org/2000/svg", "")
    assert re.findall(r"https?:|@import|url\(|src=\"//", text) == []


@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("sink", SINKS)
def test_a_script_has_no_way_to_make_text_into_markup_nor_keeps_anything(name: str, sink: str) -> None:
    assert sink not in SCRIPTS[name]


@pytest.mark.parametrize("name", dashboard_files())
def test_every_file_is_kept_from_other_sites_and_taken_for_what_it_is(name: str) -> None:
    headers = dict(dashboard_files()[name].head.headers)
    assert headers[b"x-content-type-options"] == b"nosniff"
    assert headers[b"cross-origin-resource-policy"] == b"same-origin"
    if name != "page.html":
        assert Endpoint.DASHBOARD_FILE.pattern.fullmatch(f"/dashboard/{name}".encode())


def test_what_is_imported_is_there_and_all_of_it_is_small() -> None:
    named = {one for text in SCRIPTS.values() for one in re.findall(r"from \"\./([\w.]+)\"", text)}
    assert named | {"page.js"} == set(SCRIPTS)
    assert sum(len(one.body) for one in dashboard_files().values()) < 64_000


def test_every_field_that_a_person_fills_has_a_label() -> None:
    html = PAGE.body.decode()
    labelled = set(re.findall(r"<label>[^<]*<input id=\"([\w-]+)\"", html))
    assert labelled == set(re.findall(r"<input id=\"([\w-]+)\"", html))
