"""The language of the templates, as ``gpuserve/cli/export/templates`` tells it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpuserve.cli.export import manifest_templates
from gpuserve.cli.export.manifest_templates import Reasoned, yaml_text


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The templates of a test, in place of those of the package."""
    monkeypatch.setattr(manifest_templates, "__file__", str(tmp_path / "manifest_templates.py"))
    (tmp_path / "templates").mkdir()
    return tmp_path / "templates"


def made(folder: Path, template: str, **places: Any) -> str:
    (folder / "one.yaml").write_text(template)
    manifest_templates._parse_template.cache_clear()
    return yaml_text(manifest_templates.fill_template("one.yaml", places))


def test_a_place_alone_is_of_its_own_kind(folder: Path) -> None:
    assert made(folder, "a: <n>\nb: '<n>'\n<n>-c: x<n>\n", n=1) == 'a: 1\nb: "1"\n"1-c": x1\n'
    assert made(folder, "a: <gone>\nb:\n- <gone>\n- {c: <gone>}\n", gone=None) == "b:\n- {}\n"


@pytest.mark.parametrize(("on", "expected"), [(True, "a: 1\nb:\n- one\n"), (False, "b:\n- two\n---\nc: 2\n")])
def test_conditions(folder: Path, on: bool, expected: str) -> None:
    template = "a: !if:on 1\nb:\n- !if:on one\n- !unless:on two\n--- !unless:on\nc: 2\n"
    assert made(folder, template, on=on) == expected
    assert made(folder, template, on=Reasoned(on, "It is.")) == expected


def test_an_entry_is_repeated_and_mappings_are_merged(folder: Path) -> None:
    template = "l:\n- !each:ports {name: <name>, <<: <more>}\n"
    text = made(folder, template, ports=[{"name": "a"}, {"name": "b"}], more={"x": 1})
    assert text == "l:\n- name: a\n  x: 1\n- name: b\n  x: 1\n"


def test_a_comment_goes_with_what_it_is_above_of(folder: Path) -> None:
    template = "# For readers here.\n\n# It is\n# <why>.\na: <n>\nb: <n>\nl:\n# An entry.\n- {c: 1, d: 2}\n"
    expected = "# It is so.\na: 1\n# Its own.\nb: 1\nl:\n# An entry.\n- c: 1\n  d: 2\n"
    assert made(folder, template, why="so", n=Reasoned(1, "Its own.")) == expected


def test_a_place_without_a_value_is_a_mistake(folder: Path) -> None:
    with pytest.raises(KeyError):
        made(folder, "a: <missing>\n")
