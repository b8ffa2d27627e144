"""The page at ``/docs``: in one piece, fetching nothing from elsewhere, and no name in it can run."""

from __future__ import annotations

import base64
import hashlib
import re

import pytest

from gpuserve.front.protocols.http.static_pages import docs_page

HTML = docs_page().body.decode()
HEADERS = dict(docs_page().head.headers)
POLICY = HEADERS[b"content-security-policy"].decode()


def inside(tag: str) -> str:
    (found,) = re.findall(rf"<{tag}>(.*?)</{tag}>", HTML, re.DOTALL)
    return str(found)


@pytest.mark.parametrize("tag", ["style", "script"])
def test_the_policy_allows_what_is_in_the_page_and_nothing_else(tag: str) -> None:
    digest = base64.b64encode(hashlib.sha256(inside(tag).encode()).digest()).decode()
    assert f"{tag}-src 'sha256-{digest}'" in POLICY.split("; ")


def test_the_policy_forbids_everything_else() -> None:
    assert POLICY.startswith("default-src 'none'; ")
    assert "unsafe" not in POLICY
    assert "require-trusted-types-for 'script'" in POLICY
    assert "frame-ancestors 'none'" in POLICY


def test_nothing_comes_from_another_server() -> None:
    assert re.findall(r"https?:|//\w|@import|url\(", re.sub(r"// .*", "", HTML)) == []


@pytest.mark.parametrize(
    "sink",
    [
        "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function(",
        "srcdoc", "onclick=",
    ],
)  # fmt: skip
def test_the_script_has_no_way_to_make_text_into_markup(sink: str) -> None:
    assert sink not in HTML


def test_the_placeholders_are_filled_and_the_page_is_small() -> None:
    assert "/* style */" not in HTML
    assert "/* script */" not in HTML
    assert len(docs_page().body) < 20_000
