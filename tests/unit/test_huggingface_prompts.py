"""Prompts and the text of tokens, without torch."""

from __future__ import annotations

import asyncio
import math
import re
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuserve.backends.huggingface.prompt_batches import (
    Prompt,
    PromptRow,
    RowSampling,
    RowStreamer,
    Sampling,
    TextOfTokens,
    TextPiece,
    limited_prompt,
    read_parameters,
)
from gpuserve.backends.huggingface.text_writer import SHORT_CHARACTERS, SharedTokens
from gpuserve.core.errors import InvalidArgument


def decode(tokens: list[int]) -> str:
    """Each token is a byte of UTF-8."""
    return bytes(tokens).decode(errors="replace")


@given(st.text())
def test_pieces_joined_are_the_text(text: str) -> None:
    tokens = TextOfTokens(decode)
    pieces = [tokens.push(byte) for byte in text.encode()]
    assert "".join(pieces) + tokens.rest() == text


def test_a_character_is_held_back_until_it_is_whole() -> None:
    tokens = TextOfTokens(decode)
    assert [tokens.push(byte) for byte in "aé".encode()] == ["a", "", "é"]
    assert tokens.rest() == ""
    assert [tokens.push(byte) for byte in "€".encode()[:2]] == ["", ""]
    assert tokens.rest() == "\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(
    ("parameters", "said"),
    [
        ({"max_new_tokens": 0}, "Parameter 'max_new_tokens' must be an int of at least 1, but is 0"),
        ({"max_new_tokens": 1.5}, "must be an int"),
        ({"temperature": -1}, "must be a number from 0 to 100, but is -1"),
        ({"temperature": float("nan")}, "must be a number"),
        ({"top_p": "0.5"}, "Parameter 'top_p' must be a number from 0 to 1, but is '0.5'"),
        ({"top_k": True}, "must be an int"),
    ],
)
def test_parameters_are_checked(parameters: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=re.escape(said)):
        read_parameters(parameters)


def test_parameters_that_are_not_known_are_left_alone() -> None:
    assert read_parameters({"trace": "x", "temperature": 1}) == {"temperature": 1.0}


def test_a_prompt_leaves_as_much_room_as_there_is() -> None:
    default = Sampling(temperature=0.5)
    made = limited_prompt([1] * 30, {"max_new_tokens": 10, "seed": 3}, default, 256, 32)
    assert made == Prompt([1] * 30, 2, Sampling(temperature=0.5, seed=3))
    assert limited_prompt([1], {}, default, 256, None).max_new_tokens == 256
    with pytest.raises(InvalidArgument, match="has 32 tokens, and the model takes 32"):
        limited_prompt([1] * 32, {}, default, 256, 32)
    with pytest.raises(InvalidArgument, match="no token"):
        limited_prompt([], {}, default, 256, 32)


def test_bytes_that_never_become_a_character_are_told_in_time() -> None:
    decoded = 0

    def broken(tokens: list[int]) -> str:
        nonlocal decoded
        decoded += len(tokens)
        return "\N{REPLACEMENT CHARACTER}" * len(tokens)

    text = TextOfTokens(broken)
    told = "".join([text.push(1) for _ in range(1000)]) + text.rest()
    assert len(told) == 1000
    assert decoded < 1000 * 64, "the tokens are not all decoded again with each"


def row(told: list[Any], limit: int = 9) -> PromptRow:
    return PromptRow(Prompt([1], limit, Sampling()), told.append, TextOfTokens(decode), frozenset({0}))


class Tokens:
    """As much of a tensor as a streamer looks at."""

    def __init__(self, *tokens: int) -> None:
        self._tokens = list(tokens)

    def flatten(self) -> Tokens:
        return self

    def tolist(self) -> list[int]:
        return self._tokens


def test_rows_of_a_batch_end_by_themselves() -> None:
    short: list[Any] = []
    long: list[Any] = []
    left: list[Any] = []
    rows = [row(short, 2), row(long), row(left)]
    streamer = RowStreamer(rows)
    streamer.put(Tokens(1, 1, 1))  # the prompts
    streamer.put(Tokens(*b"abc"))
    rows[2].cancel()
    streamer.put(Tokens(*b"abc"))
    assert [one.over for one in rows] == [True, False, True]
    streamer.put(Tokens(*b"x", 0, *b"x"))
    streamer.end()
    assert short == [TextPiece("a", 1), TextPiece("a", 1, "length")]
    assert long == [TextPiece("b", 1), TextPiece("b", 1), TextPiece("", 1, "stop")]
    assert left == [TextPiece("c", 1)]


def test_a_row_may_ask_for_the_log_probabilities_of_the_model() -> None:
    torch = pytest.importorskip("torch")
    told: list[Any] = []
    prompt = Prompt([1], 2, Sampling(temperature=0.5, seed=1), n_likeliest=2)
    asking = PromptRow(prompt, told.append, TextOfTokens(decode), frozenset({0}), chr)
    sampling = RowSampling([row([]), asking], "cpu")
    likelihoods = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.1, 0.2, 0.3, 0.4]])
    for token in (1, 2):
        sampling(torch.tensor([[1], [1]]), likelihoods.log())
        asking.add_token(token)
    likeliest = [("\x03", pytest.approx(math.log(0.4))), ("\x02", pytest.approx(math.log(0.3)))]
    assert [(one.text, one.finish_reason) for one in told] == [("\x01", ""), ("\x02", "length")]
    assert [one.logprob for one in told] == [pytest.approx(math.log(one)) for one in (0.2, 0.3)]
    assert [list(one.top_logprobs) for one in told] == [likeliest, likeliest]


def test_a_batch_that_fails_tells_the_rows_that_are_not_over() -> None:
    over: list[Any] = []
    open_: list[Any] = []
    rows = [row(over, 1), row(open_)]
    rows[0].add_token(ord("a"))
    error = RuntimeError("no memory")
    for one in rows:
        one.fail(error)
    assert over == [TextPiece("a", 1, "length")]
    assert open_ == [error]


@pytest.mark.parametrize("n_characters", [10, SHORT_CHARACTERS + 1])
def test_the_answers_of_a_request_share_the_tokens_of_its_prompt(n_characters: int) -> None:
    made: list[str] = []
    may_end = threading.Event()

    def tokens(text: str) -> list[int]:
        if n_characters > SHORT_CHARACTERS:
            assert may_end.wait(20), "the loop waits for a long prompt"
        made.append(text)
        if text == "bad":
            raise InvalidArgument("refused")
        return [len(text)]

    async def all_of_them() -> list[Any]:
        shared = SharedTokens()

        def wanted(text: str, n: int) -> list[Any]:
            return [shared.of(text, n_characters, lambda: tokens(text)) for _ in range(n)]

        answers = asyncio.gather(*wanted("good", 128), *wanted("bad", 2), return_exceptions=True)
        given_up = asyncio.ensure_future(wanted("good", 1)[0])
        await asyncio.sleep(0)
        given_up.cancel()
        may_end.set()
        again = await answers, await shared.of("good", n_characters, lambda: tokens("good"))
        return [*again[0], again[1]]

    *good, bad, also_bad, again = asyncio.run(all_of_them())
    assert [*good, again] == [[4]] * 129
    assert all(isinstance(one, InvalidArgument) for one in (bad, also_bad))
    assert made == ["good", "bad", "good"]
