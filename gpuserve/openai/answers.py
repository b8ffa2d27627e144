"""Values that a callable returns for a request of an OpenAI client, and their conversion to deltas of an
answer.

``AnswerChoice`` counts tokens and cuts an answer at the client's stop sequences and token limit.
``StopSequences`` is an automaton over all stop sequences of a request.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from gpuserve.core.errors import Code


@dataclass(frozen=True, slots=True)
class Token:
    """A piece of the text.

    Args:
        text: The text.
        count: Number of tokens in the text.
        finish_reason: "stop", "length", "tool_calls" or "content_filter" for the last piece of an answer,
            else "".
        logprob: Log probability of the token. Sent if the client asks for it.
        top_logprobs: The likeliest tokens at this place with their log probabilities. Sent if the client asks
            for them.
    """

    text: str
    count: int = 1
    finish_reason: str = ""
    logprob: float | None = None
    top_logprobs: Sequence[tuple[str, float]] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call of one of the request's tools, or a part of a call: parts with the same ``index`` are one call.
    ``arguments`` is JSON, or a piece of JSON. A call whose ``id`` is "" gets an id.
    """

    name: str = ""
    arguments: str = ""
    id: str = ""
    index: int = 0


@dataclass(frozen=True, slots=True)
class Usage:
    """The number of tokens of the prompt, and of the answer if the count of its pieces is not that number."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Embeddings:
    """The vectors of one request, one in each row, and the number of tokens of its inputs, or that of each.
    Without it, inputs that are tokens are counted, and the number of tokens in texts is 0.
    """

    vectors: Any
    prompt_tokens: int | Sequence[int] | None = None


class BadRequest(Exception):
    """An error that a callable raises if the client must change its request: the answer has status 400 and
    this text. ``param`` is the wrong member of the request.
    """

    code = Code.INVALID_ARGUMENT

    def __init__(self, text: str, param: str = "") -> None:
        super().__init__(f"{param}: {text}" if param else text)


class NoSuchEndpoint(Exception):
    """An error for an endpoint that the model does not answer."""

    code = Code.NOT_FOUND


def without_frames(error: Exception) -> Exception:
    """Return the error without its traceback, cause and context.

    Their frames refer to the request, and the request keeps the error as its answer. Without this, the body
    of a failed request stays in memory until the garbage collector runs.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


STOP: Final = "stop"
LENGTH: Final = "length"
TOOL_CALLS: Final = "tool_calls"
FINISH_REASONS: Final = frozenset({STOP, LENGTH, TOOL_CALLS, "content_filter", "function_call"})
#: Cost in characters of a delta beside its text, and of a token with its log probability.
_DELTA_COST: Final = 64
_LIKELIHOOD_COST: Final = 64


class Delta(NamedTuple):
    """The new part of an answer. ``tokens`` are the new tokens. The last delta has a ``finish_reason``."""

    text: str
    tokens: Sequence[Token] = ()
    tool_call: ToolCall | None = None
    finish_reason: str = ""

    def cost(self, *, with_logprobs: bool) -> int:
        """Return the approximate length of the delta in an answer, in characters."""
        cost = _DELTA_COST + len(self.text)
        if self.tool_call is not None:
            cost += len(self.tool_call.arguments)
        if with_logprobs:
            cost += sum([_LIKELIHOOD_COST * (1 + len(one.top_logprobs)) for one in self.tokens])
        return cost


class AnswerChoice:
    """One answer. If ``over`` is true, the callable is not asked for more."""

    __slots__ = ("_calls_tool", "_count", "_limit", "_stop", "_tokens", "_usage", "over")

    def __init__(self, limit: int | None, stops: StopSequences) -> None:
        self._limit = limit
        self._stop = StoppableText(stops)
        self._usage = Usage()
        self._count = 0
        self._tokens: list[Token] = []
        self._calls_tool = False
        self.over = False

    @property
    def usage(self) -> tuple[int, int]:
        """The numbers of tokens of the prompt and of the answer."""
        made = self._usage.completion_tokens
        return self._usage.prompt_tokens, self._count if made is None else made

    def add(self, value: Any) -> Delta | None:
        """Add a value of the callable. Return the new part of the answer, or None. Raise TypeError."""
        if isinstance(value, str):
            value = Token(value)
        if isinstance(value, Token):
            return self._add_token(value)
        if isinstance(value, ToolCall):
            self._calls_tool = True
            return Delta("", (), value)
        if isinstance(value, Usage):
            self._usage = value
            return None
        raise TypeError(
            "a callable for an OpenAI model gives str, Token, ToolCall or Usage, but one gave "
            f"{type(value).__name__}"
        )

    def end(self) -> Delta:
        """Return the last delta, after the last value of the callable."""
        self.over = True
        return self._delta(self._stop.rest(), TOOL_CALLS if self._calls_tool else STOP)

    def _add_token(self, token: Token) -> Delta | None:
        self._count += token.count
        self._tokens.append(token)
        text = self._stop.feed(token.text)
        reason = self._finish_reason(token)
        if reason:
            self.over = True
            return self._delta(text + self._stop.rest(), reason)
        return self._delta(text) if text else None

    def _finish_reason(self, token: Token) -> str:
        if self._stop.found:
            return STOP
        if token.finish_reason and token.finish_reason not in FINISH_REASONS:
            known = ", ".join(sorted(FINISH_REASONS))
            raise ValueError(f"finish_reason must be one of {known}, got {token.finish_reason!r}")
        if token.finish_reason:
            return token.finish_reason
        return LENGTH if self._limit is not None and self._count >= self._limit else ""

    def _delta(self, text: str, reason: str = "") -> Delta:
        tokens, self._tokens = self._tokens, []
        return Delta(text, tokens, None, reason)


class StopSequences:
    """The stop sequences of a request as one automaton (Aho and Corasick, 1975), which all answers of the
    request share. A state is the longest suffix of the text that is a prefix of a sequence.
    """

    __slots__ = ("_depths", "_fallbacks", "_first", "_found", "_next")

    def __init__(self, sequences: Sequence[str]) -> None:
        #: By state: the state after each character; the depth; the state of the longest proper suffix; and
        #: the length of the longest sequence that ends here.
        self._next: list[dict[str, int]] = [{}]
        self._depths, self._fallbacks, self._found = [0], [0], [0]
        for sequence in sequences:
            self._add(sequence)
        self._link_fallbacks()
        #: The first characters of all sequences. The state is 0 until one of these comes.
        self._first = re.compile("[" + re.escape("".join(self._next[0])) + "]") if sequences else None

    def search(self, text: str, start: int, state: int) -> tuple[int, int]:
        """Continue in ``state``; return the start of the first, longest sequence or -1, and the state."""
        if self._first is None:
            return -1, 0
        at, end = start, len(text)
        while at < end:
            if not state:
                match = self._first.search(text, at)
                if match is None:
                    break
                at = match.start()
            character = text[at]
            while state and character not in self._next[state]:
                state = self._fallbacks[state]
            state = self._next[state].get(character, 0)
            at += 1
            if self._found[state]:
                return at - self._found[state], state
        return -1, state

    def partial_length(self, state: int) -> int:
        """Return how many characters at the end of the text may start a sequence."""
        return self._depths[state]

    def _add(self, sequence: str) -> None:
        state = 0
        for depth, character in enumerate(sequence, start=1):
            state = self._next[state].setdefault(character, len(self._next))
            if state == len(self._next):
                self._next.append({})
                self._depths.append(depth)
                self._fallbacks.append(0)
                self._found.append(0)
        self._found[state] = len(sequence)

    def _link_fallbacks(self) -> None:
        """Set the fallback of each state, shorter states first."""
        waiting = deque(self._next[0].values())
        while waiting:
            state = waiting.popleft()
            self._found[state] = self._found[state] or self._found[self._fallbacks[state]]
            for character, after in self._next[state].items():
                fallback = self._fallbacks[state]
                while fallback and character not in self._next[fallback]:
                    fallback = self._fallbacks[fallback]
                self._fallbacks[after] = self._next[fallback].get(character, 0)
                waiting.append(after)


class StoppableText:
    """A text that comes in pieces and ends before the first stop sequence.

    A possible start of a sequence is held back until the text decides. The result does not depend on the
    pieces. If ``found`` is true, a sequence came, and neither the sequence nor later text is returned. The
    time is linear in the text.
    """

    __slots__ = ("_held", "_state", "_stops", "found")

    def __init__(self, stops: StopSequences) -> None:
        self._stops = stops
        self._state = 0
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """Return the text that is certain with this piece."""
        held = self._held
        text = held + text
        start, self._state = self._stops.search(text, len(held), self._state)
        if start >= 0:
            self.found = True
            self._held = ""
            return text[:start]
        kept = len(text) - self._stops.partial_length(self._state)
        self._held = text[kept:]
        return text[:kept]

    def rest(self) -> str:
        """Return the text that is held back, at the end of the text."""
        held, self._held = self._held, ""
        return held
