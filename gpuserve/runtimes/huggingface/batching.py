"""Prompts answered in batches by threads of their own. A batch takes what waits when it begins; a row of it
ends by itself, at its own limit, when its model says so or when nobody wants it any more. How a token is
chosen is in ``sampling``, what its text is in ``prompts``.

::

    event loop                     a thread, one batch
    begin(prompt, tell) ──► waiting ──► generate of transformers ──► tell(Piece), once a token
                                        │  RowStreamer: tokens to rows
                                        └─ RowsOver: which rows are over
"""

from __future__ import annotations

import collections
import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from gpuserve.runtimes.huggingface.prompts import LENGTH, STOP, Piece, Prompt, TextOfTokens
from gpuserve.runtimes.huggingface.sampling import RowSampling

#: Told of each piece, or of what went wrong, which is the last; in the thread of the batch.
Tell: TypeAlias = "Callable[[Piece | Exception], None]"


class Row:
    """A prompt on its way. ``over``: no more is made of it."""

    def __init__(self, prompt: Prompt, tell: Tell, text: TextOfTokens, ends: frozenset[int]) -> None:
        self.prompt = prompt
        self.over = False
        self._tell = tell
        self._text = text
        self._ends = ends
        self._count = 0
        self._untold = 0

    def cancel(self) -> None:
        """Make no more of it, and tell nothing more; from any thread."""
        self.over = True

    def take(self, token: int) -> None:
        """The next token of the row."""
        if self.over:
            return
        self._count += 1
        self._untold += 1
        if token in self._ends:
            self._finish(self._text.rest(), STOP)
            return
        text = self._text.push(token)
        if self._count >= self.prompt.max_new_tokens:
            self._finish(text + self._text.rest(), LENGTH)
        elif text:
            self._tell(Piece(text, self._tokens()))

    def end(self) -> None:
        """The model has ended, for whatever reason of its own."""
        if not self.over:
            self._finish(self._text.rest(), STOP)

    def fail(self, error: Exception) -> None:
        if not self.over:
            self.over = True
            self._tell(error)

    def _finish(self, text: str, reason: str) -> None:
        self.over = True
        self._tell(Piece(text, self._tokens(), reason))

    def _tokens(self) -> int:
        count, self._untold = self._untold, 0
        return count


class RowStreamer:
    """A streamer of transformers: first it is given the prompts, then the next token of each row."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._is_begun = False

    def put(self, value: Any) -> None:
        if not self._is_begun:
            self._is_begun = True
            return
        for row, token in zip(self._rows, value.flatten().tolist(), strict=True):
            row.take(token)

    def end(self) -> None:
        for row in self._rows:
            row.end()


class RowsOver:
    """A stopping criterion of transformers: the rows that need no more tokens."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows

    def __call__(self, input_ids: Any, _scores: Any, **_more: Any) -> Any:
        import torch

        return torch.tensor([row.over for row in self._rows], device=input_ids.device)


class PromptBatches:
    """Answers prompts, at most ``rows`` in one batch and ``batches`` at once. Its threads end with the
    process.
    """

    def __init__(self, model: Any, tokenizer: Any, *, rows: int, batches: int) -> None:
        self._model = model
        self._decode = _decoder(tokenizer)
        self._config, self._ends, self._pad = _generation(model, tokenizer)
        self._rows = rows
        self._waiting: collections.deque[Row] = collections.deque()
        self._more = threading.Condition()
        for number in range(batches):
            threading.Thread(target=self._work, name=f"generation {number}", daemon=True).start()

    def begin(self, prompts: Sequence[tuple[Prompt, Tell]]) -> list[Row]:
        """Answer these prompts, in one batch where they fit in one; at once where a thread is free."""
        rows = [Row(prompt, tell, TextOfTokens(self._decode), self._ends) for prompt, tell in prompts]
        with self._more:
            self._waiting.extend(rows)
            self._more.notify()
        return rows

    def _work(self) -> None:
        while True:
            rows = self._take()
            try:
                self._generate(rows)
            except Exception as error:  # the model's own code; the batch fails and nothing else
                for row in rows:
                    row.fail(error)

    def _take(self) -> list[Row]:
        with self._more:
            while True:
                rows: list[Row] = []
                while self._waiting and len(rows) < self._rows:
                    row = self._waiting.popleft()
                    if not row.over:
                        rows.append(row)
                if rows:
                    if self._waiting:
                        self._more.notify()
                    return rows
                self._more.wait()

    def _generate(self, rows: Sequence[Row]) -> None:
        import torch
        from transformers import LogitsProcessorList, StoppingCriteriaList

        device = self._model.device
        tokens, mask = _padded([row.prompt.tokens for row in rows], self._pad)
        config = copy.copy(self._config)
        config.max_new_tokens = max(row.prompt.max_new_tokens for row in rows)
        sampling = RowSampling([row.prompt.sampling for row in rows], device)
        with torch.inference_mode():
            self._model.generate(
                input_ids=torch.tensor(tokens, device=device),
                attention_mask=torch.tensor(mask, device=device),
                generation_config=config,
                logits_processor=LogitsProcessorList([sampling]),
                stopping_criteria=StoppingCriteriaList([RowsOver(rows)]),
                streamer=RowStreamer(rows),
            )


def _padded(prompts: Sequence[Sequence[int]], pad: int) -> tuple[list[list[int]], list[list[int]]]:
    """The prompts as rows of one length, filled on the left, and which of their tokens count."""
    longest = max(len(one) for one in prompts)
    gaps = [longest - len(one) for one in prompts]
    tokens = [[pad] * gap + list(one) for gap, one in zip(gaps, prompts, strict=True)]
    return tokens, [[0] * gap + [1] * (longest - gap) for gap in gaps]


def _decoder(tokenizer: Any) -> Callable[[list[int]], str]:
    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    return decode


def _generation(model: Any, tokenizer: Any) -> tuple[Any, frozenset[int], int]:
    """The folder's settings of generation without those that each row has for itself; the tokens at which a
    text ends; the token in front of shorter prompts.
    """
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
