"""Whatever is written as YAML is read back as it was, by readers of YAML 1.1 and of 1.2."""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from ruamel.yaml import YAML

from gpuserve.cli.export.manifest_templates import Reasoned, value_of, yaml_text

_TRICKY = (
    "yes", "NO", "1", "1e3", "0x1", "0o7", "1_000", ".5", "1:30", "2020-01-01", "null", "~", "", " ", "a: b",
    "- a", "#x", "a #b", "a\nb", "a\n\nb\n", "  a\nb", "a\n\n\n", "a\n  \n", "a\t\nb", "=", "<<", "{a}",
    "10m", "\x7f", "\u2028", "\ufeffa", "a\r\nb\n",
)  # fmt: skip
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(_TRICKY)
SCALARS = TEXTS | st.integers() | st.booleans() | st.none()


def _grown(children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    bare = children.filter(lambda one: not isinstance(one, Reasoned))
    lists, dicts = st.lists(children, max_size=4), st.dictionaries(TEXTS, children, max_size=4)
    return lists | dicts | st.builds(Reasoned, bare, st.text("because ", min_size=1, max_size=300))


@given(st.recursive(SCALARS, _grown, max_leaves=20))
def test_what_is_written_is_read(tree: Any) -> None:
    text = yaml_text([tree])
    assert YAML(typ="safe", pure=True).load(text) == without_reasons(tree)
    assert yaml.safe_load(text) == without_reasons(tree)


def test_reasons_stand_above_what_they_are_about() -> None:
    tree = {"a": Reasoned(1, "One."), "b": [{"c": Reasoned("x", "Two."), "d": 2}, Reasoned(3, "Three.")]}
    assert yaml_text([tree, {}]).splitlines() == [
        "# One.", "a: 1", "b:", "# Two.", "- c: x", "  d: 2", "# Three.", "- 3", "---", "{}",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "shown"),
    [("v1", "v1"), ("a b:c", "a b:c"), ("8000", '"8000"'), ("true", '"true"'), ("10m", '"10m"')],
)
def test_only_what_needs_quotes_has_them(text: str, shown: str) -> None:
    assert yaml_text([{"key": text}]) == f"key: {shown}\n"


def without_reasons(tree: Any) -> Any:
    """Return the tree of dicts, lists and scalars without any reasons."""
    tree = value_of(tree)
    if isinstance(tree, dict):
        return {key: without_reasons(one) for key, one in tree.items()}
    if isinstance(tree, list):
        return [without_reasons(one) for one in tree]
    return tree
