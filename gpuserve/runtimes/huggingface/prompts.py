"""What is asked of a model that writes text, and what comes of it piece by piece: the limits and the sampling
of a prompt, and the text in a row of tokens as far as it is certain. Pure: no torch, no thread.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

from gpuserve.core.errors import InvalidArgument

STOP: Final = "stop"
LENGTH: Final = "length"
#: Where neither the request nor the folder says how many tokens may be made.
MAX_NEW_TOKENS: Final = 256
#: What a byte of half a character is decoded to.
_HALF: Final = "\N{REPLACEMENT CHARACTER}"
#: A character has four bytes at most. What is no character after so many tokens is no text.
_MAX_HELD_TOKENS: Final = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen; a ``temperature`` of 0 takes the likeliest. ``seed`` None: another one
    each time.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a prompt, how many may follow, and how they are chosen."""

    tokens: Sequence[int]
    max_new_tokens: int
    sampling: Sampling


class Piece(NamedTuple):
    """Some more text, of so many ``tokens``. The last one has a ``finish_reason``, "stop" or "length"."""

    text: str
    tokens: int
    finish_reason: str = ""


class _Range(NamedTuple):
    kind: type
    least: float
    most: float
    words: str


_RANGES: Final = {
    "max_new_tokens": _Range(int, 1, math.inf, "an int of at least 1"),
    "temperature": _Range(float, 0, 100, "a number from 0 to 100"),
    "top_k": _Range(int, 0, math.inf, "an int of at least 0"),
    "top_p": _Range(float, 0, 1, "a number from 0 to 1"),
    "repetition_penalty": _Range(float, 0.01, 100, "a number from 0.01 to 100"),
    "seed": _Range(int, 0, 2**63 - 1, "an int of at least 0"),
}


def read_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """What the parameters of a request say of how to answer it; others are not looked at.

    Raises:
        InvalidArgument: one has no such value.
    """
    return {name: _checked(name, parameters[name]) for name in _RANGES if name in parameters}


def _checked(name: str, value: Any) -> Any:
    wanted = _RANGES[name]
    is_number = isinstance(value, int | wanted.kind) and not isinstance(value, bool)
    if not is_number or not wanted.least <= value <= wanted.most:
        raise InvalidArgument(f"Parameter {name!r} must be {wanted.words}, but is {value!r:.64}")
    return wanted.kind(value)


def prompt_of(
    tokens: Sequence[int], said: Mapping[str, Any], default: Sampling, limit: int, longest: int | None
) -> Prompt:
    """A prompt with what is said of it; ``limit`` is how many tokens may follow where that is not said,
    ``longest`` how many the model takes in all.

    Raises:
        InvalidArgument: the prompt has no token, or leaves no room for one.
    """
    if not tokens:
        raise InvalidArgument("the prompt has no token")
    wanted = said.get("max_new_tokens", limit)
    if longest is not None:
        if len(tokens) >= longest:
            raise InvalidArgument(
                f"the prompt has {len(tokens)} tokens, and the model takes {longest} with those that it makes"
            )
        wanted = min(wanted, longest - len(tokens))
    chosen = {key: value for key, value in said.items() if key != "max_new_tokens"}
    return Prompt(tokens, wanted, dataclasses.replace(default, **chosen))


class TextOfTokens:
    """The text of tokens that come one by one. A character whose bytes have not all come is held back; so is
    nothing else. ``decode`` makes text of some tokens.
    """

    __slots__ = ("_decode", "_n_told", "_tokens")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        #: The last tokens that were told, as some tokenizers tell a word's space only by the word before it,
        #: and those that were not. No others are kept: each token is decoded a bounded number of times.
        self._tokens: list[int] = []
        self._n_told = 0

    def push(self, token: int) -> str:
        """Return what is certain of the text that was not told, now that this token has come."""
        self._tokens.append(token)
        if len(self._tokens) - self._n_told <= _MAX_HELD_TOKENS:
            new = self._new()
            return "" if new.endswith(_HALF) else self._told(new)
        return self.rest()

    def rest(self) -> str:
        """Return what is still held back, at the end of the tokens."""
        return self._told(self._new())

    def _told(self, new: str) -> str:
        del self._tokens[: self._n_told]
        self._n_told = len(self._tokens)
        return new

    def _new(self) -> str:
        known = self._decode(self._tokens[: self._n_told])
        return self._decode(self._tokens)[len(known) :]
