"""A client is told of an exception in one line without a path; the log is told everything."""

from __future__ import annotations

import pytest

from gpuserve_worker.inference.failure import (
    TEXT_LIMIT,
    TRACEBACK_LIMIT,
    client_text,
    log_text,
    log_traceback,
)


class Unprintable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("bad shape (1, 2)"), "bad shape (1, 2)"),
        (ValueError("first\nsecond"), "first"),
        (ValueError("\n  first  \nsecond"), "first"),
        (ValueError(), "ValueError"),
        (KeyError("name"), "KeyError: 'name'"),
        (Unprintable(), "Unprintable"),
        (ValueError("x" * 10_000), "x" * TEXT_LIMIT),
        (FileNotFoundError(2, "No such file", "/models/a b/w.bin"), "[Errno 2] No such file: 'w.bin'"),
        (ValueError("cannot read /srv/models/w.bin: spoiled"), "cannot read w.bin: spoiled"),
        (ValueError('in (/srv/w.bin), "/srv/x y/v"'), 'in (w.bin), "v"'),
        (ValueError("1/2 and a/b, 3 / 4"), "1/2 and a/b, 3 / 4"),
        (ValueError("see https://example.org/docs/page"), "see https://example.org/docs/page"),
        (ValueError("/" * 50_000), "/" * TEXT_LIMIT),
        (ValueError("/a" * 50_000), None),
    ],
    ids=range(14),
)
def test_the_text_for_the_client(error: Exception, text: str | None) -> None:
    shown = client_text(error)
    assert "\n" not in shown
    assert len(shown) <= TEXT_LIMIT
    if text is not None:
        assert shown == text


def test_all_lines_for_a_client_that_is_to_be_told_them() -> None:
    assert client_text(ValueError("\nfirst\n  in /srv/w.bin\n"), all_lines=True) == "first\n  in w.bin"
    assert client_text(ValueError(), all_lines=True) == "ValueError"


def raise_with_cause() -> None:
    try:
        raise KeyError("/srv/w.bin")
    except KeyError as cause:
        raise ValueError("first\nsecond") from cause


def test_the_log_has_the_class_the_message_and_the_cause() -> None:
    with pytest.raises(ValueError, match="first") as caught:
        raise_with_cause()
    assert log_text(caught.value) == "ValueError: first second"
    assert log_text(Unprintable()) == "Unprintable"
    traceback = log_traceback(caught.value)
    assert __file__ in traceback
    assert "KeyError: '/srv/w.bin'" in traceback


def test_control_characters_do_not_reach_the_terminal_of_an_operator() -> None:
    with pytest.raises(ValueError, match="red") as caught:
        raise ValueError("\x1b[31mred\0\n\ud800 é")
    assert log_text(caught.value) == r"ValueError: \x1b[31mred\x00 \ud800 é"
    assert log_traceback(caught.value).endswith("ValueError: \\x1b[31mred\\x00\n\\ud800 é\n")


def test_an_endless_text_is_cut_in_the_log() -> None:
    error = ValueError("x" * 100_000 + "end")
    assert len(log_text(error)) < TEXT_LIMIT + 100
    traceback = log_traceback(error)
    assert len(traceback) < TRACEBACK_LIMIT + 100
    assert traceback.endswith("xend\n")
