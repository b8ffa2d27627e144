"""YAML with positions: plain data, spans, and everything that can be wrong with the text."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from gpuserve.config.yaml_document import Span, YamlSyntaxError, parse, parse_value


def test_builds_yaml_1_2() -> None:
    text = "a: no\nb: 0o17\nc: [1, 2.5, true, null, '5']\nd: 2020-01-01\ne:\n"
    document = parse(text)
    assert document.faults == ()
    assert document.data == {"a": "no", "b": 15, "c": [1, 2.5, True, None, "5"], "d": "2020-01-01", "e": None}


def test_spans_of_keys_and_values() -> None:
    document = parse("models:\n  - name: linear\n    batching: {delay: 2}\n    queue:\n")
    assert document.span_of_value(("models", 0, "name")) == Span(2, 11, 6)
    assert document.span_of_key(("models", 0, "batching", "delay")) == Span(3, 16, 5)
    assert document.span_of_value(("models", 0, "batching")) == Span(3, 15, 10)
    assert document.span_of_value(("models", 0)) == Span(2, 5, 12)
    assert document.span_of_value(("models", 0, "inputs", 3)) == Span(2, 5, 12), "the nearest ancestor"
    assert document.span_of_value(("models", 0, "queue")) == Span(4, 5, 5), "an empty value: its key"


def test_all_duplicate_keys_are_found() -> None:
    document = parse("a: 1\nb: {x: 1, x: 2}\na: 2\n")
    assert [(fault.span.line, fault.text) for fault in document.faults] == [
        (2, "key 'x' is already given in line 2"),
        (3, "key 'a' is already given in line 1"),
    ]
    assert document.data == {"a": 1, "b": {"x": 1}}


def test_merge_keys_and_aliases() -> None:
    document = parse("base: &base {a: 1, b: 2}\nchild: {<<: *base, b: 3}\n")
    assert document.data["child"] == {"a": 1, "b": 3}
    assert document.span_of_value(("child", "a")) == Span(1, 17, 1)


@pytest.mark.parametrize(
    ("text", "line", "column", "told"),
    [
        ("a: [1,\n", 1, 7, "*"),
        ("a: b: c\n", 1, 5, "*"),
        ("\ta: 1\n", 1, 1, "*"),
        (
            "a: 1\n---\nb: 2\n",
            2,
            1,
            "*: expected a single document in the stream, but found another document",
        ),
        ("a: 1\nb: \x00\n", 2, 4, "*"),
        ("a: *x\n", 1, 4, "*"),
        ("a: 'open\n", 1, 9, "*"),
        ("a:\n  - b: 1\n   c: 2\n", 3, 4, "*; indent the line as the entry before*"),
        (
            "a:\n  - b: 1\n      c: 2\n",
            3,
            8,
            "*; indent the line as the entry before, and write a space after each ':'",
        ),
        ("models:\n\t- name: x\n", 2, 1, ": the indentation has a tab, expected spaces"),
        ("models:\n  - name: a\n  \tcallable: x\n", 3, 3, ": the indentation has a tab, expected spaces"),
        ("a:\n  - name: >\n\t  text\n", 3, 1, ": the indentation has a tab, expected spaces"),
    ],
)
def test_syntax_errors_have_a_place_and_an_explanation(text: str, line: int, column: int, told: str) -> None:
    with pytest.raises(YamlSyntaxError) as caught:
        parse(text)
    assert fnmatchcase(caught.value.fault.text, f"not valid YAML{told}")
    assert caught.value.fault.span[:2] == (line, column)


@pytest.mark.thorough
def test_deep_nesting_is_an_error_and_no_crash() -> None:
    with pytest.raises(YamlSyntaxError, match="exceeded maximum nesting depth"):
        parse("[" * 10_000)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: !thing x\n", "the tag !thing is not supported"),
        ("a: !!int x\n", "'x' is no int"),
        ("true: x\n", "a key must be a string"),
        ("a: &a [*a]\n", "an alias cannot stand inside the value it names"),
        ("<<: 3\n", "'<<' takes a mapping"),
    ],
)
def test_faults(text: str, told: str) -> None:
    faults = parse(text).faults
    assert len(faults) == 1
    assert told in faults[0].text


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("9000", 9000), ("null", None), ("[8, 16]", [8, 16]), ("a", "a"), ("[8,", "[8,"),
        ("{a: 1, a: 2}", "{a: 1, a: 2}"),
    ],
)  # fmt: skip
def test_a_single_value(text: str, value: object) -> None:
    assert parse_value(text) == value
