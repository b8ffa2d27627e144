"""Batches of prompts in threads of their own: limits and sampling of a prompt, decoding of its tokens, and
the calls of transformers.

A row of a batch ends by itself: at its own limit, at an end token, or when its request is cancelled. If the
model's cache allows it (``step_rows.py``), waiting prompts join between two steps. Otherwise a batch contains
the prompts that wait when it starts.

::

    event loop                  a thread, one batch
    submit_prompts(prompts)──► waiting ──► StepRows ──────────────────► on_piece(TextPiece), for each token
                                           or generate of transformers
                                           │  RowStreamer: tokens to rows
                                           └─ finished_rows: stops them
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from gpuserve.backends.huggingface.step_rows import StepRows, can_step, padded_prompts
from gpuserve.backends.huggingface.structured_outputs import JsonMask
from gpuserve.core.errors import InvalidArgument

STOP: Final = "stop"
LENGTH: Final = "length"
#: Limit of new tokens if neither the request nor the folder has one.
MAX_NEW_TOKENS: Final = 256
#: Decoded form of an incomplete character.
_INCOMPLETE: Final = "\N{REPLACEMENT CHARACTER}"
#: A character has four bytes at most. Bytes that are no character after so many tokens are no text.
_MAX_HELD_TOKENS: Final = 16


@dataclasses.dataclass(frozen=True, slots=True)
class Sampling:
    """The choice of the next token: the likeliest if ``temperature`` is 0."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    seed: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Prompt:
    """The tokens of a prompt, the limit of new tokens, and how they are chosen. With ``n_likeliest`` each new
    token is a piece of its own, with its log probability and those of so many likeliest tokens. ``matcher``
    is the state of the answer in a grammar. ``with_special``: special tokens are part of the text.
    """

    tokens: Sequence[int]
    max_new_tokens: int
    sampling: Sampling
    n_likeliest: int | None = None
    matcher: Any = None
    with_special: bool = False


class TextPiece(NamedTuple):
    """A piece of text. The last piece has a ``finish_reason``, "stop" or "length". ``logprob`` is that of its
    only token, in the model's own distribution.
    """

    text: str
    tokens: int
    finish_reason: str = ""
    logprob: float | None = None
    top_logprobs: Sequence[tuple[str, float]] = ()


class _OptionRange(NamedTuple):
    kind: type
    least: float
    most: float
    expected: str


_OPTIONS: Final = {
    "max_new_tokens": _OptionRange(int, 1, math.inf, "an int of at least 1"),
    "temperature": _OptionRange(float, 0, 100, "a number from 0 to 100"),
    "top_k": _OptionRange(int, 0, math.inf, "an int of at least 0"),
    "top_p": _OptionRange(float, 0, 1, "a number from 0 to 1"),
    "repetition_penalty": _OptionRange(float, 0.01, 100, "a number from 0.01 to 100"),
    "seed": _OptionRange(int, 0, 2**63 - 1, "an int of at least 0"),
}


def read_parameters(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options in a request's parameters. Raise InvalidArgument for invalid values."""
    options = {}
    for name, wanted in _OPTIONS.items():
        if name not in parameters:
            continue
        value = parameters[name]
        is_number = isinstance(value, int | wanted.kind) and not isinstance(value, bool)
        if not is_number or not wanted.least <= value <= wanted.most:
            raise InvalidArgument(f"Parameter {name!r} must be {wanted.expected}, but is {value!r:.64}")
        options[name] = wanted.kind(value)
    return options


def limited_prompt(
    tokens: Sequence[int], options: Mapping[str, Any], default: Sampling, limit: int, longest: int | None
) -> Prompt:
    """Return a prompt with the options that ``read_parameters`` found; ``default`` and ``limit`` are the
    sampling and the number of new tokens where there are none. ``longest`` is the number of tokens that the
    model takes in all, or None. Raise InvalidArgument if the prompt has no token, or leaves no room for one.
    """
    if not tokens:
        raise InvalidArgument("the prompt has no token")
    wanted = options.get("max_new_tokens", limit)
    if longest is not None:
        if len(tokens) >= longest:
            raise InvalidArgument(
                f"the prompt has {len(tokens)} tokens, and the model takes {longest} with those that it makes"
            )
        wanted = min(wanted, longest - len(tokens))
    chosen = {key: value for key, value in options.items() if key != "max_new_tokens"}
    return Prompt(tokens, wanted, dataclasses.replace(default, **chosen))


class TextOfTokens:
    """The text of tokens that come one by one, without a last character whose bytes have not all come."""

    __slots__ = ("_decode", "_n_shown", "_tokens")

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        #: The last tokens that were returned as text, because some tokenizers need the word before to decode
        #: a space, and the tokens that were not. No others are kept, so each token is decoded a bounded
        #: number of times.
        self._tokens: list[int] = []
        self._n_shown = 0

    def push(self, token: int) -> str:
        """Return the text that is certain and new with this token."""
        self._tokens.append(token)
        if len(self._tokens) - self._n_shown <= _MAX_HELD_TOKENS:
            new = self._new()
            return "" if new.endswith(_INCOMPLETE) else self._show(new)
        return self.rest()

    def rest(self) -> str:
        """Return the text that was held back, at the end of the tokens."""
        return self._show(self._new())

    def _show(self, new: str) -> str:
        del self._tokens[: self._n_shown]
        self._n_shown = len(self._tokens)
        return new

    def _new(self) -> str:
        known = self._decode(self._tokens[: self._n_shown])
        return self._decode(self._tokens)[len(known) :]


#: Called in the thread of the batch with each piece, or with an error, which is the last call.
OnPiece: TypeAlias = "Callable[[TextPiece | Exception], None]"


class PromptRow:
    """A prompt in a batch, or waiting for one. A row that is ``over`` gets no more tokens."""

    def __init__(
        self,
        prompt: Prompt,
        on_piece: OnPiece,
        text: TextOfTokens,
        end_tokens: frozenset[int],
        spell: Callable[[int], str] = str,
    ) -> None:
        self.prompt = prompt
        self.over = False
        self._on_piece = on_piece
        self._text = text
        self._end_tokens = end_tokens
        self._spell = spell
        self._log_probabilities: Any = None
        self._count = 0
        self._n_unreported = 0

    @property
    def tokens(self) -> Sequence[int]:
        return self.prompt.tokens

    def cancel(self) -> None:
        """End the row without another piece; from any thread."""
        self.over = True

    def note_scores(self, scores: Any) -> None:
        """Note the model's scores [vocabulary] of the next token, before the row's own settings apply."""
        if self.prompt.n_likeliest is not None and not self.over:
            self._log_probabilities = scores.log_softmax(-1)

    def add_token(self, token: int) -> None:
        """Add the next token of the row."""
        if self.over:
            return
        self._count += 1
        self._n_unreported += 1
        if token in self._end_tokens:
            self._finish(self._text.rest(), STOP)
            return
        text, likelihoods = self._text.push(token), self._likelihoods(token)
        if self._count >= self.prompt.max_new_tokens:
            self._finish(text + self._text.rest(), LENGTH, *likelihoods)
        elif text or likelihoods:
            self._on_piece(TextPiece(text, self._new_tokens(), "", *likelihoods))

    def _likelihoods(self, token: int) -> tuple[Any, ...]:
        """Return the log probability of a token, and the likeliest tokens with theirs; () if not wanted."""
        known, self._log_probabilities = self._log_probabilities, None
        if known is None:
            return ()
        values, tokens = known.topk(min(self.prompt.n_likeliest or 0, len(known)))
        likeliest = zip(map(self._spell, tokens.tolist()), values.tolist(), strict=True)
        return float(known[token]), tuple(likeliest)

    def end(self) -> None:
        """End the row, because the model has ended for a reason of its own."""
        if not self.over:
            self._finish(self._text.rest(), STOP)

    def fail(self, error: Exception) -> None:
        if not self.over:
            self.over = True
            self._on_piece(error)

    def _finish(self, text: str, reason: str, *likelihoods: Any) -> None:
        self.over = True
        self._on_piece(TextPiece(text, self._new_tokens(), reason, *likelihoods))

    def _new_tokens(self) -> int:
        count, self._n_unreported = self._n_unreported, 0
        return count


class RowStreamer:
    """A streamer of transformers: gets the prompts, then the next tokens of all rows."""

    def __init__(self, rows: Sequence[PromptRow]) -> None:
        self._rows = rows
        self._has_prompts = False

    def put(self, value: Any) -> None:
        if not self._has_prompts:
            self._has_prompts = True
            return
        for row, token in zip(self._rows, value.flatten().tolist(), strict=True):
            row.add_token(token)

    def end(self) -> None:
        for row in self._rows:
            row.end()


class PromptBatches:
    """The daemon threads that answer prompts: ``batches`` batches at once, each of up to ``rows`` prompts."""

    def __init__(self, model: Any, tokenizer: Any, *, rows: int, batches: int) -> None:
        self._model = model
        self._decode_text = lambda tokens: str(tokenizer.decode(tokens, skip_special_tokens=True))
        self._decode: Callable[[list[int]], str] = lambda tokens: str(tokenizer.decode(tokens))
        self._config, self.end_tokens, self._pad = _generation_config(model, tokenizer)
        self._rows = rows
        self._waiting: collections.deque[PromptRow] = collections.deque()
        self._more = threading.Condition()
        run = self._run_steps if can_step(model, model.generation_config) else self._run_batches
        for number in range(batches):
            threading.Thread(target=run, name=f"generation {number}", daemon=True).start()

    def submit_prompts(self, prompts: Sequence[tuple[Prompt, OnPiece]]) -> list[PromptRow]:
        """Queue prompts, for one batch if they fit in one. They start at once if a thread is free."""
        rows = [
            PromptRow(
                prompt,
                on_piece,
                TextOfTokens(self._decode if prompt.with_special else self._decode_text),
                self.end_tokens,
                lambda token: self._decode([token]),
            )
            for prompt, on_piece in prompts
        ]
        with self._more:
            self._waiting.extend(rows)
            self._more.notify()
        return rows

    def _run_batches(self) -> None:
        while True:
            rows = self._next_rows(self._rows)
            try:
                self._generate(rows)
            except Exception as error:  # the model's own code; only this batch fails
                for row in rows:
                    row.fail(error)

    def _run_steps(self) -> None:
        import torch

        running = StepRows(self._model)
        while True:
            present = running.all_rows
            rows = self._next_rows(self._rows - len(present), waits=not present)
            try:
                samplers = [_RowSampler(row, self._model.device) for row in rows]
                with torch.inference_mode():
                    running.join(rows, [None if one.is_plain else one.scores for one in samplers])
                    running.step()
            except Exception as error:  # the model's own code; only these rows fail
                for one in (*present, *rows):
                    one.fail(error)
                running.clear()

    def _next_rows(self, most: int, *, waits: bool = True) -> list[PromptRow]:
        """Return up to ``most`` waiting rows; with ``waits`` at least one."""
        with self._more:
            while True:
                rows: list[PromptRow] = []
                while self._waiting and len(rows) < most:
                    row = self._waiting.popleft()
                    if not row.over:
                        rows.append(row)
                if rows or not waits:
                    if rows and self._waiting:
                        self._more.notify()
                    return rows
                self._more.wait()

    def _generate(self, rows: Sequence[PromptRow]) -> None:
        import torch
        from transformers import LogitsProcessorList, StoppingCriteriaList

        device = self._model.device
        tokens, mask = padded_prompts([row.prompt.tokens for row in rows], self._pad)
        config = copy.copy(self._config)
        config.max_new_tokens = max(row.prompt.max_new_tokens for row in rows)
        sampling = RowSampling(rows, device)

        def finished_rows(_input_ids: Any, _scores: Any, **_more: Any) -> Any:
            return torch.tensor([row.over for row in rows], device=device)

        with torch.inference_mode():
            self._model.generate(
                input_ids=torch.tensor(tokens, device=device),
                attention_mask=torch.tensor(mask, device=device),
                generation_config=config,
                logits_processor=LogitsProcessorList([sampling]),
                stopping_criteria=StoppingCriteriaList([finished_rows]),
                streamer=RowStreamer(rows),
            )


def _generation_config(model: Any, tokenizer: Any) -> tuple[Any, frozenset[int], int]:
    """Return the folder's config without options of single rows, the end tokens, the padding."""
    config = copy.deepcopy(model.generation_config)
    config.do_sample, config.num_beams, config.max_length = False, 1, None
    for name in ("temperature", "top_k", "top_p", "repetition_penalty"):
        setattr(config, name, None)
    ends = config.eos_token_id if config.eos_token_id is not None else tokenizer.eos_token_id
    listed = [] if ends is None else list(ends) if isinstance(ends, list | tuple) else [ends]
    config.eos_token_id = listed or None
    known = (config.pad_token_id, tokenizer.pad_token_id, *listed, 0)
    pad = int(next(one for one in known if one is not None))
    config.pad_token_id = pad
    return config, frozenset(int(one) for one in listed), pad


class RowSampling:
    """A logits processor of transformers that chooses the next token of each row of a batch by the row's own
    settings.

    transformers computes the scores. Noise from the row's own generator makes the likeliest token a random
    one (the Gumbel trick), so rows with any settings share a batch, and a seed gives the same text in any
    batch.
    """

    def __init__(self, rows: Sequence[PromptRow], device: Any) -> None:
        self._rows = [(row, _RowSampler(row, device)) for row in rows]

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        for at, (row, sampler) in enumerate(self._rows):
            row.note_scores(scores[at])
            if not (sampler.is_plain or row.over):
                scores[at] = sampler.scores(input_ids[at : at + 1], scores[at : at + 1])[0]
        return scores


class _RowSampler:
    def __init__(self, row: PromptRow, device: Any) -> None:
        from transformers.generation import logits_process as known

        sampling = row.prompt.sampling
        #: The processors that transformers uses for these settings, in its order.
        self._processors: list[Any] = []
        if row.prompt.matcher is not None:
            self._processors.append(JsonMask(row.prompt.matcher, row.fail))
        if sampling.repetition_penalty != 1:
            self._processors.append(known.RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        self._random_generator: Any = None
        if sampling.temperature:
            import torch

            self._random_generator = torch.Generator(device=device)
            if sampling.seed is None:
                self._random_generator.seed()
            else:
                self._random_generator.manual_seed(sampling.seed)
            if sampling.temperature != 1:
                self._processors.append(known.TemperatureLogitsWarper(sampling.temperature))
            if sampling.top_k:
                self._processors.append(known.TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._processors.append(known.TopPLogitsWarper(max(sampling.top_p, 1e-6)))
        self.is_plain = not self._processors and self._random_generator is None

    def scores(self, input_ids: Any, scores: Any) -> Any:
        for step in self._processors:
            scores = step(input_ids, scores)
        if self._random_generator is None:
            return scores
        import torch

        noise = torch.empty_like(scores).exponential_(generator=self._random_generator).log_()
        return scores - noise
