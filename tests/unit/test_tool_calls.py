"""Tool calls in the text of a model."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import tiny_models
from hypothesis import given
from hypothesis import strategies as st
from optional_packages import needs

pytestmark = needs("torch", "transformers", "pydantic")
CALLS = [{"name": "weather", "arguments": {"city": "Köln"}}, {"name": "time", "arguments": {}}]
WRITTEN = [f"<call>{json.dumps(one)}</call>" for one in CALLS]


def read(*pieces: str, reason: str = "stop", is_parallel: bool = True) -> tuple[str, list[Any], str, int]:
    """Return text, calls, reason and number of tokens of pieces of two tokens each."""
    from gpuserve.backends.huggingface.prompt_batches import TextPiece
    from gpuserve.backends.huggingface.tool_calls import ToolCallReader
    from gpuserve.openai import Token

    parser = tiny_models.caller_tokenizer().get_response_parser(prefix="user: hi assistant:")
    reader = ToolCallReader(parser, is_parallel=is_parallel)
    values: list[Any] = []
    for at, text in enumerate(pieces):
        values += reader.read(TextPiece(text, 2, reason if at == len(pieces) - 1 else ""))
        if values[-1].finish_reason:
            break
    tokens = [one for one in values if isinstance(one, Token)]
    made = [one for one in values if one not in tokens]
    calls = [{"name": one.name, "arguments": json.loads(one.arguments)} for one in made]
    assert [one.index for one in made] == list(range(len(calls)))
    joined = "".join(one.text for one in tokens)
    return joined, calls, values[-1].finish_reason, sum(one.count for one in tokens)


@given(st.lists(st.integers(0, 150)))
def test_calls_are_found_whatever_the_pieces_are(cuts: list[int]) -> None:
    text = f"One moment. {''.join(WRITTEN)}"
    places = [0, *sorted(one for one in cuts if one < len(text)), len(text)]
    pieces = [text[start:end] for start, end in itertools.pairwise(places)]
    assert read(*pieces) == ("One moment. ", CALLS, "tool_calls", 2 * len(pieces))


def test_a_text_without_a_whole_call_is_as_it_is_and_an_answer_ends_after_the_only_call_that_is_wanted() -> (
    None
):
    assert read("it is ", "a <cal") == ("it is a <cal", [], "stop", 4)
    assert read("<call>", '{"name": "wea', reason="length") == ('{"name": "wea', [], "length", 4)
    assert read(*WRITTEN, is_parallel=False) == ("", CALLS[:1], "tool_calls", 2)
    assert read("".join(WRITTEN), is_parallel=False) == ("", CALLS[:1], "tool_calls", 2)


@pytest.mark.parametrize("wrong", ["nonsense", "[1]", '{"name": "weather"}'])
def test_what_is_no_call_is_text(wrong: str) -> None:
    text, calls, reason, _ = read(WRITTEN[0], "<call>", wrong, "</call>", " and more")
    assert wrong in text
    assert text.endswith(" and more")
    assert (calls, reason) == (CALLS[:1], "tool_calls")
