"""One answer on its way to a client: what a callable gives becomes deltas, cut at the stop sequences and at
the limit of tokens that the client names. Pure; nothing of JSON.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from gpuserve.openai.answers import Token, ToolCall, Usage
from gpuserve.openai.stops import Stops, StopText

STOP: Final = "stop"
LENGTH: Final = "length"
TOOL_CALLS: Final = "tool_calls"
FINISH_REASONS: Final = frozenset({STOP, LENGTH, TOOL_CALLS, "content_filter", "function_call"})
#: Of a delta beside its text, and of a token with its log probability.
_DELTA_COST: Final = 64
_LIKELIHOOD_COST: Final = 64


class Delta(NamedTuple):
    """What is new of an answer. ``tokens`` are those that came since the last one. The last delta has a
    ``finish_reason``.
    """

    text: str
    tokens: Sequence[Token] = ()
    tool_call: ToolCall | None = None
    finish_reason: str = ""

    def cost(self, *, with_logprobs: bool) -> int:
        """Return about how many characters this is in an answer, or in memory until the answer is whole."""
        cost = _DELTA_COST + len(self.text)
        if self.tool_call is not None:
            cost += len(self.tool_call.arguments)
        if with_logprobs:
            cost += sum([_LIKELIHOOD_COST * (1 + len(one.top_logprobs)) for one in self.tokens])
        return cost


class Choice:
    """One answer. ``over``: no more is wanted of the callable."""

    __slots__ = ("_calls_tool", "_count", "_limit", "_stop", "_tokens", "_usage", "over")

    def __init__(self, limit: int | None, stops: Stops) -> None:
        self._limit = limit
        self._stop = StopText(stops)
        self._usage = Usage()
        self._count = 0
        self._tokens: list[Token] = []
        self._calls_tool = False
        self.over = False

    @property
    def usage(self) -> tuple[int, int]:
        """Tokens of the prompt, and of the answer."""
        made = self._usage.completion_tokens
        return self._usage.prompt_tokens, self._count if made is None else made

    def take(self, given: Any) -> Delta | None:
        """What is new after the callable gave this; None: nothing yet. Raises TypeError: it cannot be."""
        if isinstance(given, str):
            given = Token(given)
        if isinstance(given, Token):
            return self._text(given)
        if isinstance(given, ToolCall):
            self._calls_tool = True
            return Delta("", (), given)
        if isinstance(given, Usage):
            self._usage = given
            return None
        raise TypeError(
            "a callable for an OpenAI model gives str, Token, ToolCall or Usage, but one gave "
            f"{type(given).__name__}"
        )

    def end(self) -> Delta:
        """The last delta, where the callable came to its end by itself."""
        self.over = True
        return self._delta(self._stop.rest(), TOOL_CALLS if self._calls_tool else STOP)

    def _text(self, token: Token) -> Delta | None:
        self._count += token.count
        self._tokens.append(token)
        text = self._stop.feed(token.text)
        reason = self._reason(token)
        if reason:
            self.over = True
            return self._delta(text + self._stop.rest(), reason)
        return self._delta(text) if text else None

    def _reason(self, token: Token) -> str:
        """Why the answer ends with this token; "": it does not."""
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
