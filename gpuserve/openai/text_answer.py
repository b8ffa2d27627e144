"""The answers of one request for text, from the values of a callable to documents."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from gpuserve.openai import documents as written
from gpuserve.openai.answers import AnswerChoice, BadRequest, Delta, StopSequences
from gpuserve.openai.request_types import ChatRequest, CompletionRequest, request_for_each_answer

#: Limit of an answer that is not streamed. A piece counts as 64 characters at least.
MAX_ANSWER_CHARACTERS: Final = 64 << 20


class TextAnswer:
    """The answers of one request, by index. The documents of a stream are chunks; without ``stream`` the only
    document comes at the end.
    """

    def __init__(self, request: ChatRequest | CompletionRequest) -> None:
        kind = written.ChatDocuments if isinstance(request, ChatRequest) else written.CompletionDocuments
        self._documents: written.AnswerDocuments = kind(request)  # type: ignore[arg-type]
        self._request = request
        stops = StopSequences(request.stop)
        self.wanted = request_for_each_answer(request)
        self._choices = [AnswerChoice(request.token_limit, stops) for _ in self.wanted]
        self._whole: list[list[Delta]] = [[] for _ in self.wanted]
        self._cost = 0
        #: The answers that begin with the prompt, and have not begun.
        self._echoing = set(range(len(self.wanted)) if getattr(request, "echo", False) else ())

    def is_over(self, index: int) -> bool:
        """Return whether an answer is complete, so that the callable is not asked for more of it."""
        return self._choices[index].over

    def add(self, index: int, values: Iterable[Any], *, is_last: bool = False) -> list[bytes]:
        """Add values of the callable to an answer, which ends if ``is_last``. Return the documents of a
        stream. Raise ``BadRequest`` if the answer is too long, and ``TypeError`` or ``ValueError`` for a
        wrong value.
        """
        choice = self._choices[index]
        deltas: list[Delta] = []
        if index in self._echoing:
            self._echoing.remove(index)
            deltas.append(Delta(self.wanted[index].text))
        deltas += [made for one in values if not choice.over and (made := choice.add(one)) is not None]
        if is_last and not choice.over:
            deltas.append(choice.end())
        if self._request.stream:
            return [self._documents.chunk(index, one) for one in deltas]
        with_logprobs = self._request.logprobs not in (None, False)
        self._whole[index] += deltas
        self._cost += sum([one.cost(with_logprobs=with_logprobs) for one in deltas])
        if self._cost > MAX_ANSWER_CHARACTERS:
            raise BadRequest(
                f"the answer is over the limit of {MAX_ANSWER_CHARACTERS} characters for one that is not "
                "streamed: expected stream: true, or smaller values of max_tokens and n",
                "stream",
            )
        return []

    def end(self) -> list[bytes]:
        """Return the documents after the end of all answers."""
        counts, n = [one.usage for one in self._choices], self._request.n
        # The prompt of several answers counts once.
        firsts = range(0, len(counts), n)
        prompts = [max(prompt for prompt, _ in counts[start : start + n]) for start in firsts]
        prompt_tokens, completion_tokens = sum(prompts), sum(made for _, made in counts)
        usage = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        }
        if not self._request.stream:
            return [self._documents.whole(self._whole, usage)]
        return [self._documents.usage_chunk(usage)] if self._request.wants_usage else []
